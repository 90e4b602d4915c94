"""The dFlash drafter's checkpoint in its three formats, brought to one form.

    format       recognised by                       layer ids              slot 0 predicts
    z-lab        dflash_config, DFlash architecture  0-based                nothing (the anchor itself)
    speculators  speculators_model_type              0-based + 1            nothing, unless sample_from_anchor
    deepspec     Qwen3DSparkModel architecture       0-based, -1 embedding  the token after the anchor, unless
                                                                            sample_from_anchor is false

Whatever the format, `DrafterCheckpoint` has z-lab tensor names and 0-based layer ids. A refiner head in the
same folder is left to `read_refiner`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from xpress_export.errors import CheckpointError
from xpress_export.exporter.checkpoint_files import Json, describes_drafter, integer, require, table
from xpress_export.exporter.configs import DecoderConfig, DrafterConfig
from xpress_export.exporter.decoder_config import SLIDING, Shapes, check_tensors, decoder_config, layer_shapes
from xpress_export.exporter.head_files import HeadFiles, open_head_files
from xpress_export.exporter.target_checkpoint import TargetCheckpoint
from xpress_export.exporter.weights import WeightSource

ZLAB, SPECULATORS, DEEPSPEC = "z-lab", "speculators", "deepspec"
HEAD_PREFIXES = ("xpress_head.", "markov_head.", "confidence_head.")
TRAINING_ONLY = ("t2d", "verifier_norm.weight", "verifier_lm_head.weight")
FC, EMBEDDING, HEAD, D2T = "fc.weight", "embed_tokens.weight", "lm_head.weight", "d2t"

# Variants with other maths: what they are, the config keys and the tensor name parts that give them away.
VARIANTS: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("a DFlash2 drafter", ("conv_kernel_size", "selector_rank"), ("_conv.", "candidate_selector")),
    ("a Laguna drafter (one norm per target layer)", (), ("aux_hidden_norms", "g_proj")),
    ("a MiMo drafter (own mask embedding)", ("attention_value_scale", "use_swa"), ("mask_embedding", "sink")),
    ("a Muse-Glimmer drafter", (), ("encoder.fc", "encoder.output_norm")),
    ("a JetSpec drafter (causal head)", ("causal_head",), ()),
    (
        "a drafter with scaled embeddings or logits",
        ("output_multiplier", "final_logit_softcapping", "input_embedding_scale"),
        (),
    ),
)


@dataclass(frozen=True, kw_only=True)
class DrafterCheckpoint:
    """A drafter that fits its target.

    weights: `fc.weight`, `hidden_norm.weight`, `norm.weight`, `layers.<i>...`; `embed_tokens.weight` only
        with `config.own_embedding`; `lm_head.weight` [Vd or V, E] only with `config.own_head`.
    d2t: int64 [Vd], target id minus draft id; None: draft ids are target ids. With d2t and no own head, the
        head is the rows `draft_to_target` of the target's head.
    """

    config: DrafterConfig
    weights: WeightSource
    source: str
    folder_or_file: Path
    digest: str
    layout: str
    files: tuple[Path, ...]
    d2t: torch.Tensor | None = field(default=None, compare=False)

    @property
    def draft_to_target(self) -> torch.Tensor | None:
        """int64 [Vd]: the target id of each draft id, None where they are the same."""
        return None if self.d2t is None else self.d2t + torch.arange(len(self.d2t))


@dataclass(frozen=True, kw_only=True)
class _Settings:
    """A configuration, read but not checked. taps: 0-based, None: default. causal: None: sliding only."""

    layout: str
    body: Json
    block_size: Any
    mask_token_id: Any
    taps: Any
    first_slot: int
    causal: bool | None


def read_drafter(source: str, target: TargetCheckpoint) -> DrafterCheckpoint:
    """Read the drafter that `source` names (folder, hub id or training `.pt`), checked to fit `target`."""
    files = open_head_files(source, "drafter", "draft_state_dict")
    _check_role(files)
    _refuse_variants(files)
    weights = _drafter_weights(files.weights)
    settings = _settings(files.raw, files.where)
    d2t = weights.read(D2T) if D2T in weights.names() else None
    config = _drafter_config(settings, files, weights, target, d2t)
    check_tensors(weights, drafter_shapes(config, with_d2t=d2t is not None), "dFlash drafter")
    _check_d2t(d2t, files, target)
    return DrafterCheckpoint(
        config=config,
        weights=weights.subset(weights.names() - {D2T}),
        source=source,
        folder_or_file=files.path,
        digest=files.digest(),
        layout=settings.layout,
        files=files.files,
        d2t=d2t,
    )


def drafter_shapes(config: DrafterConfig, *, with_d2t: bool = False) -> Shapes:
    """Names and shapes of every tensor of a drafter."""
    decoder, taps = config.decoder, len(config.target_layer_ids)
    hidden = decoder.hidden_size
    head_rows = config.draft_vocab_size or decoder.vocab_size
    shapes = layer_shapes(decoder, "")
    shapes |= {FC: (hidden, taps * config.target_hidden_size), "hidden_norm.weight": (hidden,)}
    shapes |= {"norm.weight": (hidden,)}
    shapes |= {EMBEDDING: (decoder.vocab_size, hidden)} if config.own_embedding else {}
    shapes |= {HEAD: (head_rows, hidden)} if config.own_head else {}
    return shapes | ({D2T: (head_rows,)} if with_d2t else {})


def default_target_layer_ids(num_target_layers: int, num_taps: int) -> tuple[int, ...]:
    """The layers a z-lab drafter taps when its configuration does not say."""
    if num_taps == 1:
        return (num_target_layers // 2,)
    step = (num_target_layers - 4) / (num_taps - 1)
    return tuple(round(1 + i * step) for i in range(num_taps))


def _check_role(files: HeadFiles) -> None:
    raw = files.raw
    if not raw:
        raise CheckpointError(
            f"{files.path} has no config.json beside it; put the drafter's config.json in {files.path.parent}"
        )
    if not describes_drafter(raw):
        kind = ", ".join(map(str, raw.get("architectures") or [])) or f"model_type {raw.get('model_type')!r}"
        raise CheckpointError(f"{files.where} describes {kind}, not a dFlash drafter; pass it as the target instead")


def _refuse_variants(files: HeadFiles) -> None:
    nested = table(files.raw, "dflash_config", files.where)
    for label, keys, parts in VARIANTS:
        marks = [key for key in keys if files.raw.get(key) or nested.get(key)]
        marks += sorted(name for name in files.weights.names() if any(part in name for part in parts))
        if marks:
            raise CheckpointError(
                f"{files.path} is {label}, told by {marks[0]}; that variant is not supported, "
                f"use a plain dFlash drafter"
            )


def _drafter_weights(weights: WeightSource) -> WeightSource:
    """The drafter's own tensors: no refiner head, no training leftovers."""
    return weights.subset(
        name
        for name in weights.names() - set(TRAINING_ONLY)
        if not name.startswith(HEAD_PREFIXES) and not name.endswith("rotary_emb.inv_freq")
    )


def _settings(raw: Json, where: str) -> _Settings:
    if "speculators_model_type" in raw:
        return _speculators_settings(raw, where)
    deepspec = any("DSpark" in str(name) for name in raw.get("architectures") or [])
    anchored = _either(raw, "sample_from_anchor", where)
    causal = raw.get("is_causal")
    return _Settings(
        layout=DEEPSPEC if deepspec else ZLAB,
        body=raw,
        block_size=_either(raw, "block_size", where),
        mask_token_id=_either(raw, "mask_token_id", where),
        taps=_either(raw, "target_layer_ids", where),
        first_slot=0 if (deepspec if anchored is None else anchored) else 1,
        causal=table(raw, "dflash_config", where).get("causal") if causal is None else causal,
    )


def _speculators_settings(raw: Json, where: str) -> _Settings:
    kind = raw["speculators_model_type"]
    if kind not in {"dflash", "xpress"}:
        raise CheckpointError(f"{where}: speculators model {kind!r} is not supported, only 'dflash' and 'xpress'")
    require(raw, "transformer_layer_config", where)
    ids = raw.get("aux_hidden_state_layer_ids")
    return _Settings(
        layout=SPECULATORS,
        body=table(raw, "transformer_layer_config", where),
        block_size=raw.get("block_size", 8),
        mask_token_id=raw.get("mask_token_id"),
        taps=[i - 1 if type(i) is int else i for i in ids] if isinstance(ids, list) else ids,
        first_slot=0 if raw.get("sample_from_anchor") else 1,
        causal=False if raw.get("sliding_window_non_causal") else None,
    )


def _either(raw: Json, key: str, where: str) -> Any:
    """`key` at the top level or in `dflash_config`; both spellings exist, and must not disagree."""
    top, nested = raw.get(key), table(raw, "dflash_config", where).get(key)
    if top is not None and nested is not None and top != nested:
        raise CheckpointError(
            f"{where} has '{key}' {top!r} at the top but {nested!r} in 'dflash_config'; remove the wrong one"
        )
    return nested if top is None else top


def _drafter_config(
    settings: _Settings,
    files: HeadFiles,
    weights: WeightSource,
    target: TargetCheckpoint,
    d2t: torch.Tensor | None,
) -> DrafterConfig:
    where, names = files.where, weights.names()
    decoder = _decoder(settings, where)
    _check_fits_target(files.raw, decoder, target, weights, where)
    taps = _taps(settings, weights, target, where)
    _check_fc(weights, len(taps), target)
    return DrafterConfig(
        decoder=decoder,
        block_size=_block_size(settings, where),
        mask_token_id=_mask_token_id(settings, target, where),
        target_layer_ids=taps,
        target_hidden_size=target.config.hidden_size,
        first_slot=settings.first_slot,
        causal_layers=_causal_layers(settings, decoder),
        draft_vocab_size=_draft_vocab_size(files.raw, weights, decoder, d2t),
        own_embedding=EMBEDDING in names,
        own_head=HEAD in names,
        num_target_layers=target.config.num_layers,
    )


def _decoder(settings: _Settings, where: str) -> DecoderConfig:
    body = settings.body
    kind = body.get("model_type", "qwen3")
    if kind != "qwen3":
        raise CheckpointError(f"{where}: drafter layers of type {kind!r} are not supported, only 'qwen3'")
    sliding = SLIDING in (body.get("layer_types") or [])  # drafters slide by `layer_types` alone
    if sliding:
        body = {**body, "use_sliding_window": True, "sliding_window": require(body, "sliding_window", where)}
    return replace(decoder_config(body, "qwen3", where), tied_head=False)


def _check_fits_target(
    raw: Json, decoder: DecoderConfig, target: TargetCheckpoint, weights: WeightSource, where: str
) -> None:
    """Numbers that must be those of the target; a drafter with its own embedding and head may be narrower."""
    own = {EMBEDDING, HEAD} <= weights.names()
    pairs = [
        ("num_target_layers", raw.get("num_target_layers"), target.config.num_layers),
        ("target_hidden_size", raw.get("target_hidden_size"), target.config.hidden_size),
        ("hidden_size", None if own else decoder.hidden_size, target.config.hidden_size),
        ("vocab_size", decoder.vocab_size, target.config.vocab_size),
    ]
    for key, got, expected in pairs:
        if got is not None and got != expected:
            raise CheckpointError(
                f"{where}: '{key}' is {got} but the target {target.source} has {expected}; "
                f"pair the drafter with the target it was trained for"
            )


def _taps(settings: _Settings, weights: WeightSource, target: TargetCheckpoint, where: str) -> tuple[int, ...]:
    num_layers, taps = target.config.num_layers, settings.taps
    if taps is None:
        return _default_taps(settings, weights, target)
    if not isinstance(taps, list) or not taps or not all(type(i) is int for i in taps):
        raise CheckpointError(
            f"{where}: the target layer ids should be a list of integers, got {taps!r}; correct the file"
        )
    outside = [i for i in taps if not -1 <= i < num_layers]
    if outside:
        shift = 1 if settings.layout == SPECULATORS else 0
        raise CheckpointError(
            f"{where}: target layer id {outside[0] + shift} is out of range, the target {target.source} has "
            f"{num_layers} layers ({shift - 1}..{num_layers - 1 + shift}); pair it with its own target"
        )
    return tuple(taps)


def _default_taps(settings: _Settings, weights: WeightSource, target: TargetCheckpoint) -> tuple[int, ...]:
    num_layers = target.config.num_layers
    if settings.layout == SPECULATORS:
        return (1, num_layers // 2 - 1, num_layers - 4)
    columns = weights.size(FC, -1) if FC in weights.names() else target.config.hidden_size
    return default_target_layer_ids(num_layers, max(1, columns // target.config.hidden_size))


def _check_fc(weights: WeightSource, num_taps: int, target: TargetCheckpoint) -> None:
    if FC not in weights.names():
        return
    got, expected = weights.size(FC, -1), num_taps * target.config.hidden_size
    if got != expected:
        raise CheckpointError(
            f"{weights.where}: {FC} takes {got} features, expected {expected} ({num_taps} target layers of "
            f"hidden size {target.config.hidden_size}); pair the drafter with the target it was trained for"
        )


def _block_size(settings: _Settings, where: str) -> int:
    found = {"block_size": settings.block_size}
    block_size = integer(require(found, "block_size", where), "block_size", where)
    if block_size <= settings.first_slot:
        raise CheckpointError(f"{where}: 'block_size' {block_size} leaves no slot to draft in; correct it")
    return block_size


def _mask_token_id(settings: _Settings, target: TargetCheckpoint, where: str) -> int:
    found = {"mask_token_id": settings.mask_token_id}
    mask = integer(require(found, "mask_token_id", where), "mask_token_id", where, minimum=0)
    rows = target.config.vocab_size
    if mask >= rows:
        raise CheckpointError(
            f"{where}: 'mask_token_id' {mask} is outside the {rows} embedding rows of the target "
            f"{target.source}; pair the drafter with the target it was trained for"
        )
    return mask


def _causal_layers(settings: _Settings, decoder: DecoderConfig) -> tuple[bool, ...]:
    if settings.causal is not None:
        return (bool(settings.causal),) * decoder.num_layers
    return tuple(window is not None for window in decoder.layer_windows)


def _draft_vocab_size(raw: Json, weights: WeightSource, decoder: DecoderConfig, d2t: torch.Tensor | None) -> int | None:
    """Rows of the drafter's head where they are not the target's; a smaller head needs the map `d2t`."""
    declared = raw.get("draft_vocab_size")
    if d2t is not None:
        return integer(declared, "draft_vocab_size", weights.where) if declared else d2t.numel()
    stored = weights.size(HEAD, 0) if HEAD in weights.names() else decoder.vocab_size
    for rows in (declared, stored):
        if rows not in {None, decoder.vocab_size}:
            raise CheckpointError(
                f"{weights.where} drafts over {rows} of {decoder.vocab_size} tokens but has no tensor {D2T} "
                f"that maps them to the target's; save the map with the checkpoint"
            )
    return None


def _check_d2t(d2t: torch.Tensor | None, files: HeadFiles, target: TargetCheckpoint) -> None:
    if d2t is None:
        return
    if d2t.dtype != torch.int64:
        raise CheckpointError(f"{files.path}: tensor {D2T} should be int64, got {d2t.dtype}; save it as int64")
    ids = d2t + torch.arange(len(d2t))
    if int(ids.min()) < 0 or int(ids.max()) >= target.config.vocab_size or len(set(ids.tolist())) != len(ids):
        raise CheckpointError(
            f"{files.path}: tensor {D2T} should map each draft id to another target id below "
            f"{target.config.vocab_size}, as an offset to add to the draft id; save it so"
        )
