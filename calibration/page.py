"""The page of `check --html`: one file, no scripts, nothing fetched."""

from __future__ import annotations

import math
from collections.abc import Sequence

from jinja2 import Environment

from xpress_export.calibration.check import Checked
from xpress_export.calibration.sensitivity import Sensitivity
from xpress_export.calibration.sqnr import LayerNoise

_BEST_DB = 60.0

_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{{ title }}</title>
<style>
 body { font: 15px/1.5 system-ui, sans-serif; max-width: 64rem; margin: 2rem auto; padding: 0 1rem; color: #1b1f24 }
 h1 { font-size: 1.4rem } h2 { font-size: 1.1rem; margin-top: 2rem }
 table { border-collapse: collapse; width: 100% }
 td, th { text-align: left; padding: .2rem .6rem; border-bottom: 1px solid #ddd }
 td.n { text-align: right; font-variant-numeric: tabular-nums }
 .bar { fill: #76b900 } .ref { fill: #b8bec6 } .range { fill: #cfe3f7 } .clip { fill: #c0392b }
 .whisker { stroke: #1b1f24 } .fail { color: #c0392b; font-weight: 600 } text { font-size: 12px; fill: #333 }
</style>
<h1>{{ title }}</h1>
<p>{{ c.num_prompts }} prompts ({{ c.prompts }}), executed on CPU. Every figure is against the bundle's own graphs in
 the same process; ± is a 95% confidence interval.</p>
<h2>Thresholds</h2>
<table><tr><th><th>figure<th>measured<th>limit</tr>
{% for v in c.verdicts %}<tr><td{% if not v.passed %} class="fail"{% endif %}>{{ "pass" if v.passed else "FAIL" }}
<td>{{ v.what }}<td class="n">{{ "%.2f" | format(v.value) }}<td class="n">{{ v.limit }}</tr>{% endfor %}</table>
{% if c.accuracy %}<h2>Target</h2>
<table><tr><th>precision<th>perplexity<th>against float<th>greedy match<th>tokens: text / answers</tr>
{% for name, a in c.accuracy.items() %}<tr><td>{{ name }}<td class="n">{{ "%.3f" | format(a.perplexity) }}
<td class="n">{{ "%+.2f%% ± %.2f" | format(100 * a.ratio, 100 * a.ratio_ci95) }}
<td class="n">{{ "%.1f%% ± %.1f" | format(100 * a.match_rate, 100 * a.match_ci95) }}
<td class="n">{{ a.num_text_tokens }} / {{ a.num_answer_tokens }}</tr>{% endfor %}</table>{% endif %}
{% if c.acceptance %}<h2>tau by precision</h2>
<svg width="100%" height="{{ 22 * c.acceptance | length + 4 }}" role="img" aria-label="tau by precision">
{% for a in c.acceptance %}{% set y = 22 * loop.index0 %}
<text x="0" y="{{ y + 15 }}">{{ a.mode }}, target {{ a.target }}, drafter {{ a.drafter }}</text>
<rect class="{{ 'ref' if loop.index0 < modes else 'bar' }}" x="34%" y="{{ y + 3 }}" height="14"
 width="{{ (a.tau / longest * 50) | round(2) }}%"/>
<line class="whisker" x1="{{ (34 + (a.tau - a.tau_ci95) / longest * 50) | round(2) }}%" y1="{{ y + 10 }}"
 x2="{{ (34 + (a.tau + a.tau_ci95) / longest * 50) | round(2) }}%" y2="{{ y + 10 }}"/>
<text x="{{ (35 + (a.tau + a.tau_ci95) / longest * 50) | round(2) }}%" y="{{ y + 15 }}"
>{{ "%.3f" | format(a.tau) }} ({{ "%+.1f%%" | format(100 * a.change) }})</text>{% endfor %}</svg>{% endif %}
{% for precision, layers in noise %}<h2>SQNR per layer, {{ precision }}, the worst first</h2>
<svg width="100%" height="{{ 14 * layers | length + 4 }}" role="img" aria-label="SQNR per layer">
{% for n in layers %}<text x="0" y="{{ 14 * loop.index0 + 11 }}">{{ n.role }} {{ n.layer }}</text>
<rect class="bar" x="34%" y="{{ 14 * loop.index0 + 2 }}" height="10"
 width="{{ width(n.sqnr_db) }}%"/><text x="{{ 35 + width(n.sqnr_db) }}%" y="{{ 14 * loop.index0 + 11 }}"
>{{ "%.1f dB" | format(n.sqnr_db) }}</text>{% endfor %}</svg>{% endfor %}
{% for precision, layers in ranges %}<h2>Activation ranges, {{ precision }}</h2>
<p>Bar: the greatest value seen (after SmoothQuant, where it was used); red: the value that becomes the greatest code.
 Logarithmic, from {{ "%.2g" | format(low) }} to {{ "%.2g" | format(high) }}.</p>
<svg width="100%" height="{{ 14 * layers | length + 4 }}" role="img" aria-label="activation ranges">
{% for n in layers %}<text x="0" y="{{ 14 * loop.index0 + 11 }}">{{ n.role }} {{ n.layer }}</text>
<rect class="range" x="34%" y="{{ 14 * loop.index0 + 2 }}" height="10" width="{{ log(n.amax) }}%"/>
<rect class="clip" x="{{ (34 + log(n.clip)) | round(2) }}%" y="{{ 14 * loop.index0 }}" height="13" width="2"/>
<text x="{{ (35 + log(n.amax)) | round(2) }}%" y="{{ 14 * loop.index0 + 11 }}">{{ "%.3g" | format(n.amax) }}</text>
{% endfor %}</svg>{% endfor %}
{% for s in sensitivity %}<h2>Sensitivity, {{ s.precision }} {{ s.role }}</h2>
<table><tr><th>left in high precision<th>loss, %</tr>
<tr><td>nothing<td class="n">{{ "%.2f" | format(s.quantized.loss) }}
{% for t in s.trials %}<tr><td>{{ t.left_out[0] }}<td class="n">{{ "%.2f" | format(t.loss) }}</tr>{% endfor %}</table>
<p>{% if s.recipe %}Within {{ s.budget }}%: {{ s.recipe.left_out | join(", ") or "nothing need be left out" }}
 ({{ "%.2f" | format(s.recipe.loss) }}%).{% else %}No combination is within {{ s.budget }}%.{% endif %}</p>{% endfor %}
</html>
"""


def check_page(checked: Checked, sensitivity: Sequence[Sensitivity] = ()) -> str:
    """HTML with the figures of `checked` and plots: SQNR per layer, ranges with their clip, tau by precision."""
    ranged = [layer for layer in checked.noise if layer.amax is not None and layer.clip is not None]
    values = [value for layer in ranged for value in (layer.amax, layer.clip) if value]
    low, high = min(values, default=1.0) / 2, max(values, default=1.0)

    def log(value: float) -> float:
        """Percent of the page's width."""
        return round(56 * math.log(max(value, low) / low) / max(math.log(high / low), 1e-9), 2)

    return (
        Environment(autoescape=True)
        .from_string(_PAGE)
        .render(
            title=f"xpress-export check {checked.bundle}",
            c=checked,
            modes=len({row.mode for row in checked.acceptance}),
            longest=max((row.tau + row.tau_ci95 for row in checked.acceptance), default=1.0),
            noise=_by_precision(checked.noise),
            ranges=_by_precision(ranged),
            width=lambda decibel: round(56 * min(max(decibel, 0.0), _BEST_DB) / _BEST_DB, 2),
            log=log,
            low=low,
            high=high,
            sensitivity=sensitivity,
        )
    )


def _by_precision(layers: Sequence[LayerNoise]) -> list[tuple[str, list[LayerNoise]]]:
    precisions = dict.fromkeys(layer.precision for layer in layers)
    return [(name, [layer for layer in layers if layer.precision == name]) for name in precisions]
