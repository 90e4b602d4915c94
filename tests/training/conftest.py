"""Tiny samples for the training tests: random sequences with random hidden states, and data folders of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from xpress_export.exporter.target_checkpoint import read_target
from xpress_export.training.blocks import Sample
from xpress_export.training.store import Answer, DataInfo, DataWriter

NUM_PROMPT, NUM_RESPONSE = 6, 14


def random_sample(config: Any, seed: int, num_prompt: int = NUM_PROMPT, num_response: int = NUM_RESPONSE) -> Sample:
    """A sequence whose hidden states say what follows, as a target's do."""
    generator = torch.Generator().manual_seed(seed)
    length = num_prompt + num_response
    width = len(config.target_layer_ids) * config.target_hidden_size
    return Sample(
        tokens=torch.randint(0, config.decoder.vocab_size - 10, (length,), generator=generator),
        num_prompt=num_prompt,
        features=torch.randn(length - 1, width, generator=generator),
        final_hidden=torch.randn(length - 1, config.target_hidden_size, generator=generator),
    )


@pytest.fixture
def make_sample() -> Callable[..., Sample]:
    return random_sample


@pytest.fixture(scope="session")
def tiny_data(tiny_trio: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder of 12 random answers for the tiny target."""
    folder = tmp_path_factory.mktemp("data")
    target = read_target(str(tiny_trio.target))
    config = tiny_trio.drafter_module.config
    hidden = target.config.hidden_size
    info = DataInfo(
        target_digest=target.digest,
        target_layer_ids=config.target_layer_ids,
        hidden_size=hidden,
        vocab_size=target.config.vocab_size,
        width=(len(config.target_layer_ids) + 1) * hidden,
    )
    writer = DataWriter(folder, info)
    for seed in range(12):
        sample = random_sample(config, seed)
        tokens, split = tuple(sample.tokens.tolist()), sample.num_prompt
        answer = Answer(source=f"s{seed % 2}", prompt=tokens[:split], response=tokens[split:])
        assert sample.final_hidden is not None
        writer.append(answer, torch.cat((sample.features, sample.final_hidden), dim=1))
    return folder
