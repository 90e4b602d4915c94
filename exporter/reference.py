"""The target as transformers has it: the independent reference of parity checks, benchmarks and tests."""

from __future__ import annotations

import torch

from xpress_export.errors import ParityError
from xpress_export.exporter.decoder_config import transformers_config
from xpress_export.exporter.target_checkpoint import TargetCheckpoint


def reference_from_checkpoint(target: TargetCheckpoint) -> torch.nn.Module:
    """transformers' own causal LM in float32 with the checkpoint's weights and eager attention, for evaluation.

    Raises ParityError if a weight is missing or one is not known.
    """
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    config = transformers_config(target.raw_config, target.model_type, target.source)
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    state = {name: target.weights.read(name).float() for name in target.weights.names()}
    missing, unexpected = model.load_state_dict(state, strict=False, assign=True)
    tied = {"lm_head.weight"} if target.config.tied_head else set()
    if set(missing) - tied or unexpected:
        raise ParityError(f"transformers' {type(model).__name__} misses {missing} and does not know {unexpected}")
    if target.config.tied_head:
        model.tie_weights()
    if target.folder_or_file.suffix == ".gguf":  # rope scaling may lie in a tensor that transformers does not read
        model.model.rotary_emb.inv_freq = torch.tensor(target.config.rope.inv_freq)
    return model  # type: ignore[no-any-return]
