"""The page of `bench --html`: one file, no scripts, nothing fetched."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jinja2 import Environment

if TYPE_CHECKING:
    from xpress_export.runtime.bench import BenchReport

_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{{ title }}</title>
<style>
 body { font: 15px/1.5 system-ui, sans-serif; max-width: 64rem; margin: 2rem auto; padding: 0 1rem; color: #1b1f24 }
 h1 { font-size: 1.4rem } h2 { font-size: 1.1rem; margin-top: 2rem }
 table { border-collapse: collapse; width: 100% } .wide { overflow-x: auto }
 td, th { text-align: left; padding: .25rem .6rem; border-bottom: 1px solid #ddd; white-space: nowrap }
 td.n { text-align: right; font-variant-numeric: tabular-nums }
 text { font-size: 12px; fill: #333 } line { stroke: #1b1f24 }
 .target { fill: #b8bec6 } .dflash { fill: #a7d05a } .xpress { fill: #76b900 } .adaptive { fill: #3f6f00 }
 .draft { fill: #a7d05a } .refine { fill: #3f6f00 } .verify { fill: #76b900 } .host { fill: #d1495b }
 .key { display: inline-block; width: .8em; height: .8em; margin: 0 .3em 0 1em }
 @media print { body { margin: 0 } }
</style>
{% macro bar(y, width, css) %}<rect class="{{ css }}" x="150" y="{{ y }}" height="16"
 width="{{ width | round(2) }}"/>{% endmacro %}
<h1>{{ title }}</h1>
<p>Executed on {{ facts.executed_on }}. {{ report.num_requests }} requests of at most {{ facts.max_new_tokens }} new
tokens per row and round, {{ facts.rounds }} rounds, greedy;
{{ "every row generated the same tokens" if report.same_tokens else "rows did NOT generate the same tokens" }}.
Import of the runtime {{ "%.2f" | format(report.startup.import_s) }} s, opening
{{ "%.2f" | format(report.startup.open_s) }} s beyond {{ "%.2f" | format(report.startup.read_s) }} s of reading files,
peak memory {{ "%.2f" | format(report.peak_memory_bytes / 1e9) }} GB.</p>

<h2>Tokens per second</h2>
<p>Bars: median over rounds; lines: least to most.</p>
<svg viewBox="0 0 900 {{ 22 * report.rows | length + 12 * groups | length }}" width="100%" role="img"
 aria-label="tokens per second by mode and number of clients">
{% set ns = namespace(y=0) %}{% for clients, rows in groups %}{% for r in rows %}
<text x="0" y="{{ ns.y + 14 }}">{{ r.mode }}, {{ clients }}</text>
{{ bar(ns.y + 2, r.tokens_per_s.median / fastest * 640, r.mode) }}
<line x1="{{ (150 + r.tokens_per_s.least / fastest * 640) | round(1) }}" y1="{{ ns.y + 10 }}"
 x2="{{ (150 + r.tokens_per_s.most / fastest * 640) | round(1) }}" y2="{{ ns.y + 10 }}"/>
<text x="{{ (158 + r.tokens_per_s.most / fastest * 640) | round(1) }}" y="{{ ns.y + 14 }}">
{{- "%.1f" | format(r.tokens_per_s.median) }} ({{ "%.2f" | format(r.speed_up.median) }}x)</text>
{% set ns.y = ns.y + 22 %}{% endfor %}{% set ns.y = ns.y + 12 %}{% endfor %}</svg>

<h2>A decode cycle, ms</h2>
<p>{% for stage in stages %}<span class="key"><svg width="12" height="12"><rect class="{{ stage }}" width="12"
 height="12"/></svg></span>{{ stage }}{% endfor %}</p>
<svg viewBox="0 0 900 {{ 22 * report.rows | length }}" width="100%" role="img" aria-label="parts of a cycle">
{% for r in report.rows %}{% set x = namespace(at=150.0) %}{% set y = 22 * loop.index0 %}
<text x="0" y="{{ y + 14 }}">{{ r.mode }}, {{ r.concurrency }}</text>
{% for stage in stages %}{% set width = r.cycle_ms[stage] / longest * 640 %}
<rect class="{{ stage }}" x="{{ x.at | round(2) }}" y="{{ y + 2 }}" height="16"
 width="{{ width | round(2) }}"><title>{{ stage }} {{ "%.2f" | format(r.cycle_ms[stage]) }} ms</title></rect>
{% set x.at = x.at + width %}{% endfor %}
<text x="{{ (x.at + 8) | round(1) }}" y="{{ y + 14 }}">{{ "%.1f" | format(r.cycle_ms.values() | sum) }}
</text>{% endfor %}</svg>

<h2>All figures</h2>
<div class="wide"><table><tr><th>mode<th>clients<th>tokens/s<th>speed-up<th>scaling<th>tau<th>first token ms
<th>per token ms<th>gap ms<th>host share<th>prefill ms</tr>
{% for r in report.rows %}<tr><td>{{ r.mode }}<td class="n">{{ r.concurrency }}
<td class="n">{{ "%.1f" | format(r.tokens_per_s.median) }}
{% for ratio in (r.speed_up, r.scaling) %}<td class="n">
{{- "%.2fx (%.2f-%.2f)" | format(ratio.median, ratio.least, ratio.most) }}{% endfor %}
<td class="n">{{ "%.2f" | format(r.tau) }}
{% for found in (r.ttft_ms, r.itl_ms, r.gap_ms) %}<td class="n">
{{- "%.0f / %.0f / %.0f" | format(found.p50, found.p90, found.p99) }}{% endfor %}
<td class="n">{{ "%.2f" | format(100 * r.host_share) }}%<td class="n">{{ "%.0f" | format(r.prefill_ms) }}</tr>
{% endfor %}</table></div>
<p>Ratios are medians over rounds with their range: speed-up over plain decoding with as many clients, scaling over the
fewest clients. Times are p50 / p90 / p99. Per token: the time between two arrivals, shared out over the tokens of the
second. Host share: time outside engine calls, of all time while there was work.</p>
</html>
"""


def bench_page(report: BenchReport, facts: Mapping[str, Any]) -> str:
    """The page as HTML. facts: bundle, executed_on, max_new_tokens, rounds."""
    clients = dict.fromkeys(row.concurrency for row in report.rows)
    return (
        Environment(autoescape=True)
        .from_string(_PAGE)
        .render(
            title=f"xpress-export bench {facts['bundle']}",
            report=report,
            facts=facts,
            groups=[(count, [row for row in report.rows if row.concurrency == count]) for count in clients],
            stages=tuple(report.rows[0].cycle_ms),
            fastest=max(row.tokens_per_s.most for row in report.rows),
            longest=max(sum(row.cycle_ms.values()) for row in report.rows) or 1.0,
        )
    )
