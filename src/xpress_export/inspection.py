"""Manifests and machines as tables for a person to read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import RenderableType

from xpress_export import names
from xpress_export.console import human_bytes, table
from xpress_export.manifest import GraphRecord, Manifest


def describe(manifest: Manifest) -> Iterator[RenderableType]:
    """The sections of `inspect`."""
    m = manifest
    facts: list[tuple[str, object]] = [
        ("platform", m.platform),
        ("precision", f"{m.precision}, {m.lowering} lowering, opset {m.opset}"),
        ("layout", _layout(m)),
        ("context", f"{m.max_context} tokens"),
        ("size", f"{human_bytes(m.num_bytes)} in {len(m.files)} files"),
        ("built with", ", ".join(f"{name} {version}" for name, version in m.tool.items())),
        ("sha256", m.digest[:16]),
    ]
    if m.draft is not None:
        d = m.draft
        taps = ", ".join(map(str, d.target_layer_ids))
        facts.append(
            ("block", f"{d.block_size} slots, {d.num_draft_tokens} draft tokens, mask token {d.mask_token_id}")
        )
        facts.append(("tapped layers", f"{taps} (layer i is hidden_states[i + 1])"))
        facts.append(("refine passes", d.refine_passes))
        facts.append(("drafter", "trained" if d.trained else "UNTRAINED: random stand-in weights"))
    yield table("Bundle", ("", ""), facts)
    yield ""
    models = [model for model in (m.target, m.drafter, m.refiner) if model is not None]
    rows = [
        (
            role,
            f"{model.num_parameters / 1e6:.1f}M",
            getattr(model, "family", None) or getattr(model, "kind", ""),
            model.digest[:16],
            model.source,
        )
        for role, model in zip(m.roles, models, strict=True)
    ]
    yield table("Models", ("role", "parameters", "family", "sha256", "source"), rows)
    for role, graph in (*m.graphs.items(), *((role, m.cycle[role]) for role in names.CYCLE if role in m.cycle)):
        yield ""
        yield _graph_table(role, graph)
    yield ""
    yield parity_table(m)
    if m.variants:
        yield ""
        yield _variants_table(m)
    yield ""
    files = [(f.path, human_bytes(f.num_bytes), f.sha256[:16]) for f in m.files]
    yield table("Files", ("path", "size", "sha256"), files)


def _layout(m: Manifest) -> str:
    if m.layout == names.LAYOUT_SPLIT:
        return f"{m.layout}: a graph for each model"
    return f"{m.layout}: a cycle is one graph, in {', '.join(m.precisions(names.STEP))}"


def _variants_table(m: Manifest) -> RenderableType:
    """Quantized graphs; the precision that runs unless another is asked for is in the title."""
    rows = [
        (
            v.role,
            v.precision,
            v.num_layers,
            "-" if v.smoothquant is None else v.smoothquant,
            v.scales or "-",
            ", ".join(v.kept[:4]) + (f" and {len(v.kept) - 4} more" if len(v.kept) > 4 else ""),
        )
        for v in m.variants
    ]
    title = f"Quantized graphs (runs in {m.run_precision or m.precision})"
    return table(title, ("model", "precision", "layers", "smoothquant", "scales", "kept high"), rows)


def parity_table(manifest: Manifest) -> RenderableType:
    """How far each graph was from its model when it was exported."""
    rows = [
        (c.graph, c.measure, f"{c.value:.1e}" if c.value else "0", f"{c.tolerance:g}", c.rows, c.against)
        for c in manifest.parity
    ]
    return table(
        "Graphs against their models (executed, ONNX Runtime CPU)",
        ("graph", "measure", "value", "allowed", "rows", "against"),
        rows,
    )


def _graph_table(role: str, graph: GraphRecord) -> RenderableType:
    """Bindings of one graph; the caches of a model, two per layer and alike, take one line."""
    rows = []
    for direction, tensors, side in (("in", graph.inputs, "past_"), ("out", graph.outputs, "present_")):
        plain = [(t.name, t) for t in tensors if side not in t.name]
        for prefix in (side, names.of_drafter(side)):
            caches = [t for t in tensors if t.name.startswith(prefix)]
            if caches:
                plain.append((f"{caches[0].name} ... {caches[-1].name} ({len(caches)})", caches[0]))
        rows += [(direction, name, t.dtype, "[" + ", ".join(map(str, t.shape)) + "]") for name, t in plain]
    return table(f"Graph {role} ({graph.file})", ("", "name", "dtype", "shape"), rows)


def describe_machine(facts: Mapping[str, Any]) -> Iterator[RenderableType]:
    """The sections of `doctor`."""
    memory = facts["memory_available_bytes"]
    yield table(
        "This machine",
        ("", ""),
        [
            ("xpress-export", f"{facts['xpress_export']}, Python {facts['python']}, {facts['system']}"),
            ("cores", facts["cores"]),
            (
                "memory",
                "unknown" if memory is None else f"{human_bytes(memory)} free of {human_bytes(facts['memory_bytes'])}",
            ),
            ("disk", f"{human_bytes(facts['disk_free_bytes'])} free here"),
            ("GPU", "; ".join(map(_gpu, facts["gpus"])) or "none found"),
            ("ONNX Runtime", ", ".join(facts["onnxruntime_providers"]) or "none usable"),
        ],
    )
    yield ""
    rows = [("yes" if c["available"] else "no", c["name"], c["fix"] or "") for c in facts["capabilities"]]
    yield table("It can", ("", "", "to add it" if any(fix for _, _, fix in rows) else ""), rows)
    yield ""
    yield table("Packages", ("package", "version"), list(facts["packages"].items()))


def _gpu(facts: Mapping[str, Any]) -> str:
    driver = "" if facts["driver"] is None else f", driver {facts['driver']}"
    return f"{facts['name']}, compute capability {facts['sm'] // 10}.{facts['sm'] % 10}{driver}"
