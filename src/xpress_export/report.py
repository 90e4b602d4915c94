"""Self-contained HTML pages: one file, no scripts, nothing fetched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from jinja2 import Environment

from xpress_export import published

if TYPE_CHECKING:
    from xpress_export.runtime.evaluate import Row

_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{{ title }}</title>
<style>
 body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #1b1f24 }
 h1 { font-size: 1.4rem } h2 { font-size: 1.1rem; margin-top: 2rem }
 table { border-collapse: collapse; width: 100% }
 td, th { text-align: left; padding: .25rem .6rem; border-bottom: 1px solid #ddd }
 td.n { text-align: right; font-variant-numeric: tabular-nums } .bar { fill: #76b900 } .plain { fill: #b8bec6 }
 text { font-size: 12px; fill: #333 }
 .published { color: #6a737d; margin-top: 1rem } caption { text-align: left }
</style>
<h1>{{ title }}</h1>
<p>{{ how[0] | upper }}{{ how[1:] }}; {{ max_new_tokens }} new tokens.
 tau: tokens per verify step, mean over responses with its 95% confidence interval.</p>
{% for benchmark, rows in groups %}
<h2>{{ benchmark }} ({{ rows[0].num_prompts }} prompts)</h2>
<table><tr><th>mode<th>tau<th>tokens/s<th>speed-up</tr>
{% for r in rows %}<tr><td>{{ r.arm }}<td class="n">{{ "%.3f ± %.3f" | format(r.tau, r.tau_ci95) }}
<td class="n">{{ "%.1f" | format(r.tokens_per_s) if r.tokens_per_s else "-" }}
<td class="n">{{ "%.2fx" | format(r.speed_up) if r.speed_up else "-" }}</tr>
{% endfor %}</table>
<svg width="100%" height="{{ 22 * rows | length + 4 }}" role="img" aria-label="tau by mode">
{% for r in rows %}<text x="0" y="{{ 22 * loop.index0 + 16 }}">{{ r.arm }}</text>
<rect class="{{ 'plain' if r.arm == 'target' else 'bar' }}" x="120" y="{{ 22 * loop.index0 + 3 }}" height="16"
 width="{{ (r.tau / longest * 60) | round(2) }}%"/>{% endfor %}</svg>
{% for r in rows if r.slot_rates %}<p>{{ r.arm }}, accepted per slot:
{% for rate in r.slot_rates %}{{ "%.2f" | format(rate) }} {% endfor %}</p>{% endfor %}
{% endfor %}
<h2>For comparison: {{ label }}</h2>
<p>{{ publication.source }}: {{ publication.setting }}. {{ publication.note }}.</p>
{% for table in publication.tables %}
<table class="published"><caption>temperature {{ table.temperature }}, tau (speed-up over plain decoding)</caption>
<tr><th>benchmark{% for mode in published_modes %}<th>{{ mode }}{% endfor %}</tr>
{% for name, row in table.figures.items() %}<tr><td>{{ name }}{% for mode in published_modes %}
<td class="n">{{ "%.2f" | format(row[mode].tau) }} ({{ row[mode].speed_up }}x){% endfor %}</tr>
{% endfor %}<tr><td>average, as stated{% for mode in published_modes %}
<td class="n">{{ "%.2f" | format(table.average[mode].tau) }} ({{ table.average[mode].speed_up }}x){% endfor %}</tr>
</table>
{% endfor %}
</html>
"""


def evaluation_page(rows: Sequence[Row], max_new_tokens: int, how: str) -> str:
    """The page of `eval --html`. how: where the figures come from, for the line above the tables."""
    benchmarks = dict.fromkeys(row.benchmark for row in rows)
    groups = [(name, [row for row in rows if row.benchmark == name]) for name in benchmarks]
    return (
        Environment(autoescape=True)
        .from_string(_PAGE)
        .render(
            title="xpress-export eval",
            groups=groups,
            max_new_tokens=max_new_tokens,
            how=how,
            longest=max(row.tau for row in rows),
            label=published.LABEL,
            publication=published.published(),
            published_modes=published.MODES,
        )
    )
