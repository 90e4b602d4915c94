"""Do the sections of a manifest agree with one another? What a record can know on its own, it checks itself."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from xpress_export import names
from xpress_export.records import (
    DTYPES,
    GRAPHS_FOLDER,
    MANIFEST_FILE,
    GraphRecord,
    graph_stem,
    one_of,
    refuse,
)
from xpress_export.strict_json import FieldError, key_name

if TYPE_CHECKING:
    from xpress_export.manifest import Manifest

TOKENIZER_FILES = ("tokenizer.json", "text.json")


def check_sections(m: Manifest) -> None:
    """Raise FieldError for the first value that contradicts another."""
    _check_trio(m)
    _check_draft(m)
    _check_graphs(m)
    _check_decomposed(m)
    _check_variants(m)
    _check_cycle(m)
    _check_engines(m)
    _check_files(m)


def _check_trio(m: Manifest) -> None:
    """A refiner needs a drafter; what describes a model is there exactly when the model is."""
    if m.refiner and not m.drafter:
        raise FieldError("drafter", "should be a record, got null: a refiner needs the drafter it refines")
    present = [
        ("draft", m.drafter, m.draft),
        ("text.drafter_tokenizer", m.drafter, m.text.drafter_tokenizer),
        ("text.refiner_tokenizer", m.refiner, m.text.refiner_tokenizer),
        *((f"graphs.{role}", getattr(m, role), m.graphs.get(role)) for role in names.ROLES),
    ]
    for field, model, described in present:
        if (model is None) != (described is None):
            needed = "absent without its model" if model is None else "present, its model is listed"
            raise FieldError(field, f"should be {needed}")
    if unknown := set(m.graphs) - set(names.ROLES):
        raise FieldError(f"graphs.{key_name(min(unknown))}", f"is none of {', '.join(names.ROLES)}")


def _check_draft(m: Manifest) -> None:
    if m.draft is None or m.drafter is None:
        return
    vocab, layers = m.target.vocab_size, m.target.num_layers
    if m.drafter.vocab_size != vocab:
        refuse("drafter.vocab_size", f"the target's {vocab}", m.drafter.vocab_size)
    if m.draft.mask_token_id >= vocab:
        refuse("draft.mask_token_id", f"below the vocabulary's {vocab}", m.draft.mask_token_id)
    if m.draft.draft_vocab_size > vocab:
        refuse("draft.draft_vocab_size", f"at most the vocabulary's {vocab}", m.draft.draft_vocab_size)
    if (m.draft.draft_vocab_size < vocab) != (m.draft.vocab_file is not None):
        expected = "a file" if m.draft.draft_vocab_size < vocab else "null, the drafter has every token"
        refuse("draft.vocab_file", expected, m.draft.vocab_file)
    if m.draft.vocab_file is not None and m.draft.vocab_file not in {file.path for file in m.files}:
        refuse("draft.vocab_file", "listed in files", m.draft.vocab_file)
    if not all(-1 <= i < layers for i in m.draft.target_layer_ids):
        refuse("draft.target_layer_ids", f"between -1 and {layers - 1}", list(m.draft.target_layer_ids))
    if (m.draft.refine_passes > 0) != (m.refiner is not None):
        expected = "at least 1 with a refiner" if m.refiner else "0 without a refiner"
        refuse("draft.refine_passes", expected, m.draft.refine_passes)
    if m.draft.block_size > m.max_context:
        refuse("max_context", f"at least the block size {m.draft.block_size}", m.max_context)


def _check_graphs(m: Manifest) -> None:
    listed = {file.path for file in m.files}
    for role, graph in m.graphs.items():
        where = f"graphs.{role}"
        _check_graph_files(graph, where, f"{GRAPHS_FOLDER}/{role}.onnx", listed)
        _check_types(m, graph, where)
    known = [*m.graphs, *(role for role in names.CYCLE if role in m.cycle)]
    for n, parity in enumerate(m.parity):
        if parity.graph not in known:
            refuse(f"parity[{n}].graph", f"one of {', '.join(known)}", parity.graph)


def _check_types(m: Manifest, graph: GraphRecord, where: str) -> None:
    for side, tensors in (("inputs", graph.inputs), ("outputs", graph.outputs)):
        for n, tensor in enumerate(tensors):
            if tensor.dtype not in DTYPES[m.precision]:
                refuse(f"{where}.{side}[{n}].dtype", f"a type of {m.precision}", tensor.dtype)


def _check_graph_files(graph: GraphRecord, where: str, expected: str, listed: Collection[str]) -> None:
    if graph.file != expected:
        refuse(f"{where}.file", repr(expected), graph.file)
    for field, path in [("file", graph.file), *((f"data[{n}]", p) for n, p in enumerate(graph.data))]:
        if path not in listed:
            refuse(f"{where}.{field}", "listed in files", path)


def _check_decomposed(m: Manifest) -> None:
    """The second lowering covers all models or none, with the bindings of the first."""
    listed = {file.path for file in m.files}
    if m.decomposed and set(m.decomposed) != set(m.graphs):
        refuse("decomposed", f"empty or one graph for each of {', '.join(m.graphs)}", sorted(m.decomposed))
    for role, graph in m.decomposed.items():
        _check_graph_files(graph, f"decomposed.{role}", f"{GRAPHS_FOLDER}/{role}.decomposed.onnx", listed)
        _check_same_bindings(graph, m.graphs[role], f"decomposed.{role}", f"graphs.{role}")


def _check_same_bindings(graph: GraphRecord, first: GraphRecord, where: str, whose: str) -> None:
    for side in ("inputs", "outputs"):
        if getattr(graph, side) != getattr(first, side):
            raise FieldError(f"{where}.{side}", f"should be those of {whose}")


def _check_variants(m: Manifest) -> None:
    """What a variant refers to is there; there is one of each role and precision."""
    listed = {file.path for file in m.files}
    for n, variant in enumerate(m.variants):
        where = f"variants[{n}]"
        if variant.role not in m.graphs:
            refuse(f"{where}.role", f"one of {', '.join(m.graphs)}", variant.role)
        if (variant.decomposed is None) != (not m.decomposed):
            refuse(f"{where}.decomposed", "there exactly if the bundle has that lowering", variant.decomposed)
        files = {"file": variant.file, "decomposed": variant.decomposed, "scales": variant.scales}
        for field, path in [*files.items(), *((f"data[{i}]", path) for i, path in enumerate(variant.data))]:
            if path is not None and path not in listed:
                refuse(f"{where}.{field}", "listed in files", path)
    if len({(variant.role, variant.precision) for variant in m.variants}) != len(m.variants):
        raise FieldError("variants", "should not hold two of one role and precision")
    known = (None, m.precision, *dict.fromkeys(variant.precision for variant in m.variants))
    one_of(m, "run_precision", known)


def _check_cycle(m: Manifest) -> None:
    """`accept` is there, `step` exactly in a fused bundle; each in both lowerings if the models are."""
    listed = {file.path for file in m.files}
    if m.layout == names.LAYOUT_FUSED and m.drafter is None:
        refuse("layout", f"{names.LAYOUT_SPLIT!r} without a drafter", m.layout)
    own = _stems(m, None)
    others = [_stems(m, variant.precision) for variant in m.variants]
    for stems in (own, *(stems for stems in others if stems & m.cycle.keys())):
        if missing := stems - m.cycle.keys():
            raise FieldError(f"cycle.{min(missing)}", "should be present")
    allowed = own.union(*others)
    for stem, graph in m.cycle.items():
        where, role = f"cycle.{key_name(stem)}", stem.partition(".")[0]
        if stem not in allowed:
            raise FieldError(where, f"is none of {', '.join(sorted(allowed))}")
        _check_graph_files(graph, where, f"{GRAPHS_FOLDER}/{stem}.onnx", listed)
        _check_types(m, graph, where)
        _check_same_bindings(graph, m.cycle[role], where, f"cycle.{role}")


def _stems(m: Manifest, precision: str | None) -> set[str]:
    """Stems of the cycle's graphs in a precision; None: that of the bundle."""
    roles = [names.ACCEPT] if precision is None else []
    roles += [names.STEP] if m.layout == names.LAYOUT_FUSED else []
    lowerings = (False, True) if m.decomposed else (False,)
    return {graph_stem(role, precision, decomposed=decomposed) for role in roles for decomposed in lowerings}


def _check_engines(m: Manifest) -> None:
    listed = {file.path for file in m.files}
    known = [*m.graphs, *(role for role in names.CYCLE if role in m.cycle)]
    for n, engine in enumerate(m.engines):
        where = f"engines[{n}]"
        if engine.role not in known:
            refuse(f"{where}.role", f"one of {', '.join(known)}", engine.role)
        if engine.precision not in m.precisions(engine.role):
            expected = f"one that the graphs of the {engine.role} are in, {' or '.join(m.precisions(engine.role))}"
            refuse(f"{where}.precision", expected, engine.precision)
        for field in ("file", "report"):
            if getattr(engine, field) not in listed:
                refuse(f"{where}.{field}", "listed in files", getattr(engine, field))
    identities = [engine.identity for engine in m.engines]
    if len(set(identities)) != len(identities):
        raise FieldError("engines", "should not hold two engines of one role, platform, backend, precision and layout")


def _check_files(m: Manifest) -> None:
    paths = [file.path for file in m.files]
    if paths != sorted(set(paths)):
        raise FieldError("files", "should be sorted by path, each file once")
    if MANIFEST_FILE in paths:
        raise FieldError("files", f"should not list {MANIFEST_FILE} itself")
    for name in TOKENIZER_FILES:
        if f"{m.text.folder}/{name}" not in paths:
            raise FieldError("files", f"should list {m.text.folder}/{name}")
