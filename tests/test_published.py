"""Published figures, checked by arithmetic: averages from their rows, the size of the published head from its shape."""

from __future__ import annotations

import pytest
import torch

from xpress_export.exporter.configs import RefinerConfig
from xpress_export.exporter.modules import Refiner
from xpress_export.published import LABEL, MODES, Table, published
from xpress_export.report import evaluation_page
from xpress_export.runtime.evaluate import Row

TABLES = published().tables


@pytest.mark.parametrize("table", TABLES, ids=["T=0", "T=1"])
def test_stated_averages_follow_from_the_rows(table: Table) -> None:
    """To the printed digit, for tau; speed-ups are printed with one digit, so their mean is known to about 0.05.

    One stated average is not that of its rows: Markov's speed-up at T = 0, 6.1 where the rows give 5.9.
    """
    assert len(table.figures) == 7
    for mode in MODES:
        stated, mean = table.average[mode], table.mean(mode)
        assert stated.tau == pytest.approx(mean.tau, abs=0.0051), mode
        odd = 0.2 if (table.temperature, mode) == (0, "markov") else 0.0
        assert stated.speed_up == pytest.approx(mean.speed_up + odd, abs=0.11), mode


@pytest.mark.parametrize("table", TABLES, ids=["T=0", "T=1"])
def test_the_published_order_of_the_modes(table: Table) -> None:
    """xPress above Markov by 3 to 8 percent, Markov above the untouched drafter, on every benchmark."""
    for name, row in table.figures.items():
        assert row["dflash"].tau < row["markov"].tau < row["xpress"].tau, name
        assert 1.03 <= row["xpress"].tau / row["markov"].tau < 1.08, name


def test_the_headline_is_the_ratio_of_the_averages() -> None:
    greedy = TABLES[0].average
    assert greedy["xpress"].tau / greedy["dflash"].tau == pytest.approx(1.28, abs=0.005)


@pytest.mark.parametrize(
    ("rank", "hidden", "millions"), [(256, 4096, 80.54), (128, 4096, 40), (64, 4096, 20), (256, 2560, 79.8)]
)
def test_size_of_the_published_heads(rank: int, hidden: int, millions: float) -> None:
    """The head of Qwen3-8B (80.5 million) and of its siblings, counted on the module that this package exports."""
    config = RefinerConfig(
        kind="xpress",
        rank=rank,
        hidden_size=hidden,
        vocab_size=151_936,
        draft_vocab_size=151_936,
        block_size=16,
        num_passes=6,
        mlp_hidden=2 * rank,
    )
    with torch.device("meta"):
        head = Refiner(config, 1)
    count = {name: p.numel() for name, p in head.named_parameters()}
    assert sum(count.values()) / 1e6 == pytest.approx(millions, rel=5e-3)
    if (rank, hidden) == (256, 4096):
        assert sum(count.values()) == 80_543_744
        assert (count["w1.weight"] + count["w2.weight"]) / sum(count.values()) == pytest.approx(0.966, abs=5e-4)


def test_published_figures_say_that_they_are() -> None:
    assert "not measured" in LABEL
    assert "2608.02438" in published().source and "Qwen3-8B" in published().setting


def test_the_report_keeps_them_apart() -> None:
    """They come after every measured table, under a heading of their own."""
    rows = [Row("own", "target", None, 2, tau=1.0), Row("own", "xpress", 3, 2, tau=2.0)]
    page = evaluation_page(rows, 16, "executed on CPU")
    measured, others = page.split(LABEL)
    assert "Executed on CPU; 16 new tokens" in measured and "own (2 prompts)" in measured and "8.02" not in measured
    assert "8.02 (6.2x)" in others and "Qwen3-8B" in others and "own" not in others.split("<table")[1]
