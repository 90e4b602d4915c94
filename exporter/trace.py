"""PyTorch module -> ONNX graph on disk, without ever holding the weights.

A module is built and traced on fake tensors: only shapes and names exist. The graph's initializers are then
filled one at a time from the checkpoint and appended to a data file, so peak memory is one tensor, whatever the
model's size, and no protobuf ever holds a weight. A tensor that two graphs use (embedding and head, shared by
target and drafter) is stored once and referred to by both.
"""

from __future__ import annotations

import contextlib
import io
import logging
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from onnx_ir.passes import common as passes
from torch import Tensor, nn

from xpress_export.errors import ExportError

OPSET = 24
_ALIGNMENT = 4096

Source = tuple[str, Callable[[], Tensor]]
"""Identity of a weight (equal identities are stored once) and a function that reads it."""


@dataclass(frozen=True)
class Binding:
    """A named graph input or output and the symbol of each dynamic dimension, e.g. {0: "B", 2: "C"}."""

    name: str
    example: Tensor
    dims: dict[int, str]


@dataclass
class WeightFile:
    """The external data of one or more graphs in one folder: append-only, aligned, each tensor written once."""

    folder: Path
    dtype: torch.dtype
    on_bytes: Callable[[int], None] = lambda _: None
    _placed: dict[tuple[object, ...], tuple[str, int, int]] = field(default_factory=dict)

    def holds(self, identity: str, dtype: torch.dtype) -> bool:
        """Whether this weight already lies in a data file as it is, not transposed."""
        return (identity, dtype, False) in self._placed

    def place(self, file: str, source: Source, dtype: torch.dtype, transposed: bool) -> tuple[str, int, int]:
        """Write a weight unless it already lies in a data file; return (file, offset, length)."""
        identity, read = source
        key = (identity, dtype, transposed)
        if key not in self._placed:
            tensor = read().to(dtype)
            data = (tensor.t() if transposed else tensor).contiguous().numpy()
            self._placed[key] = (file, *self._append(self.folder / file, data))
            self.on_bytes(data.nbytes)
        return self._placed[key]

    def _append(self, path: Path, data: np.ndarray[Any, Any]) -> tuple[int, int]:
        with path.open("ab") as out:
            out.write(b"\0" * (-out.tell() % _ALIGNMENT))
            offset = out.tell()
            data.tofile(out)
        return offset, data.nbytes


def trace(module: nn.Module, inputs: Sequence[Binding | list[Binding]], outputs: Sequence[str]) -> ir.Model:
    """Trace a module built under FakeTensorMode into an opset-24 model with named, empty initializers.

    `inputs` follow the positional arguments of `forward`; a list stands for a list argument.
    """
    flat = [b for entry in inputs for b in (entry if isinstance(entry, list) else [entry])]
    shapes = tuple([_dims(b) for b in entry] if isinstance(entry, list) else _dims(entry) for entry in inputs)
    examples = tuple([b.example for b in e] if isinstance(e, list) else e.example for e in inputs)
    with _quiet():
        program = torch.onnx.export(
            module.eval(),
            examples,
            dynamo=True,
            opset_version=OPSET,
            optimize=False,
            dynamic_shapes=shapes,
            input_names=[b.name for b in flat],
            output_names=list(outputs),
            verbose=False,
        )
        if program is None:
            raise ExportError("torch.onnx.export returned no program")
        model = program.model
        ours = _declare_inputs(model, flat)
        _declare_outputs(model, ours)
        _forget_values(model)
        _tidy(model)
        _declare_outputs(model, ours)  # an output that was a no-op away from another value now has that one's shape
    return model


def _dims(binding: Binding) -> dict[int, Any]:
    """Dynamic without a given range: relations between dimensions are inferred, a specialised one is an error."""
    return dict.fromkeys(binding.dims, torch.export.Dim.DYNAMIC)


def _declare_inputs(model: ir.Model, bindings: Sequence[Binding]) -> dict[str, str]:
    """Give every dynamic dimension of the inputs our symbol; returns ours by the tracer's."""
    ours: dict[str, str] = {}
    for value, binding in zip(model.graph.inputs, bindings, strict=True):
        assert value.shape is not None
        sizes: list[int | str] = list(binding.example.shape)
        for axis, symbol in binding.dims.items():
            ours[str(value.shape[axis])] = sizes[axis] = symbol
        value.shape = ir.Shape(sizes)
    return ours


def _declare_outputs(model: ir.Model, ours: dict[str, str]) -> None:
    for value in model.graph.outputs:
        assert value.shape is not None
        value.shape = ir.Shape([d if isinstance(d, int) else _translate(str(d), ours) for d in value.shape])


def _translate(expression: str, ours: dict[str, str]) -> str:
    """The tracer's "s53 - 1" in our symbols: "N-1"."""
    if expression in ours:
        return ours[expression]
    return re.sub(r"\w+", lambda m: ours.get(m.group(), m.group()), expression).replace(" ", "")


def _forget_values(model: ir.Model) -> None:
    """Keep name, type and shape of each traced parameter and drop the fake tensor behind it."""
    for value in model.graph.initializers.values():
        const = value.const_value
        if const is None:
            raise ExportError(f"initializer {value.name!r} of the traced graph has no shape")
        value.type, value.shape, value.const_value = ir.TensorType(const.dtype), const.shape, None
    for value in list(model.graph.initializers.values()):
        value.name = (value.name or "").removeprefix("model.")  # the wrapper's attribute, not part of the model


def _tidy(model: ir.Model) -> None:
    """Fold constant shape arithmetic, drop no-ops, merge repeats: what is left is the model."""
    from onnxscript import optimizer

    model.producer_name, model.producer_version = "xpress-export", None
    optimizer.optimize_ir(model, onnx_shape_inference=True, input_size_limit=1024)
    passes.CommonSubexpressionEliminationPass()(model)
    passes.IdentityEliminationPass()(model)
    passes.LiftConstantsToInitializersPass(lift_all_constants=False, size_limit=0)(model)
    passes.RemoveUnusedNodesPass()(model)
    passes.RemoveUnusedOpsetsPass()(model)
    passes.ClearMetadataAndDocStringPass()(model)


def attach(model: ir.Model, weights: WeightFile, file: str, source_of: Callable[[str], Source]) -> None:
    """Fill the initializers of a traced model from their sources, as external data in `file`.

    A weight that is only ever transposed is stored transposed and the node removed: matrices then lie as
    [in, out], the constant right-hand side every engine wants, and nothing is transposed at load. One that another
    graph already stored untransposed (a tied head) is shared instead: a smaller bundle is worth the transpose.
    """
    for name, value in list(model.graph.initializers.items()):
        if value.const_value is not None:
            continue  # a constant of the graph's own arithmetic
        assert value.shape is not None and value.dtype is not None
        dtype, source = _torch_dtype(value.dtype), source_of(name)
        transposed = not weights.holds(source[0], dtype) and _absorb_transpose(value)
        shape = list(value.shape.numpy())
        place = weights.place(file, source, dtype, transposed)
        shape = shape[::-1] if transposed else shape
        expected = int(np.prod(shape)) * dtype.itemsize
        if place[2] != expected:
            raise ExportError(f"weight {name}: the graph needs {expected} bytes (shape {shape}), got {place[2]}")
        value.shape = ir.Shape(shape)
        value.const_value = ir.ExternalTensor(
            *place, value.dtype, shape=ir.Shape(shape), name=name, base_dir=weights.folder
        )


def _absorb_transpose(value: ir.Value) -> bool:
    uses = list(value.uses())
    nodes = [use.node for use in uses]
    if not nodes or any(n.op_type != "Transpose" or n.domain not in ("", "ai.onnx") for n in nodes):
        return False
    for node in nodes:
        node.outputs[0].replace_all_uses_with(value)
        node.graph.remove(node, safe=True)
    return True


def _torch_dtype(dtype: ir.DataType) -> torch.dtype:
    return {
        ir.DataType.FLOAT: torch.float32,
        ir.DataType.FLOAT16: torch.float16,
        ir.DataType.BFLOAT16: torch.bfloat16,
        ir.DataType.INT64: torch.int64,
    }[dtype]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The tracer prints progress and warns about its own deprecations; neither is the user's business."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnx_ir", "onnxscript")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
