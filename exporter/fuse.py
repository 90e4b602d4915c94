"""The step graph: a whole cycle in one graph, merged from graph files that exist already.

    part       reads                                                       for the rest of the step
    target     input_ids, write_index, past_*                              next_token, target_hidden
    accept     those, num_given, max_accept                                num_committed, anchor, previous
    drafter    those, block_ids with the anchor in slot 0, draft_past_*    draft tokens, hidden states, logits
    refiner    those, once for each pass                                   refined tokens

Nothing is traced again and no weight is written. What parts have in common, an embedding or what every pass of the
refiner computes alike, is in the step once: an engine holds it once. Each part may be in any precision; all have to
be of one lowering.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common as passes

from xpress_export import names
from xpress_export.errors import ExportError

_INPUTS = {
    names.INPUT_IDS: ("B", "S"),
    names.NUM_GIVEN: ("B",),
    names.MAX_ACCEPT: ("B",),
    names.WRITE_INDEX: ("B",),
    names.BLOCK_IDS: ("B", "N"),
}
_OUTPUTS = (names.NEXT_TOKEN, names.NUM_COMMITTED, names.NEXT_IDS, names.NEXT_GIVEN, names.NEXT_WRITE_INDEX)
_SYMBOLS = {"B", "S", "C", "N", "N-1"}
"""Dimensions that mean the same in every graph; any other symbol is one graph's own."""

_INLINE_BYTES = 1024
"""Constants up to this size are compared by value."""

Values = dict[str, ir.Value]


def fuse_step(parts: Mapping[str, Path], first_slot: int, refine_passes: int) -> ir.Model:
    """Merge the graph files of target, accept, drafter and, where it passes at all, refiner: `step` of `names`."""
    step = _Step()
    known: Values = {name: step.input(name, shape) for name, shape in _INPUTS.items()}
    known |= step.add(names.TARGET, parts[names.TARGET], known)
    present = _presents(known)
    known |= step.add(names.ACCEPT, parts[names.ACCEPT], known)
    anchor = step.op("Unsqueeze", known[names.ANCHOR], step.ints(1))  # (B, 1)
    masks = step.op("Slice", known[names.BLOCK_IDS], step.ints(1), step.ints(np.iinfo(np.int64).max), step.ints(1))
    block = {names.BLOCK_IDS: step.op("Concat", anchor, masks, axis=1)}
    drafted = step.add(names.DRAFTER, parts[names.DRAFTER], known | block, names.of_drafter)
    present |= {names.of_drafter(name): value for name, value in _presents(drafted).items()}
    tokens = drafted[names.DRAFT_TOKENS]
    for number in range(refine_passes):
        inputs = known | drafted | {names.DRAFT_TOKENS: tokens}
        tokens = step.add(f"{names.REFINER}.{number}", parts[names.REFINER], inputs)[names.REFINED_TOKENS]
    known[names.NEXT_IDS] = step.op("Concat", anchor, tokens, axis=1)
    known[names.NEXT_IDS].type = ir.TensorType(ir.DataType.INT64)
    known[names.NEXT_IDS].shape = ir.Shape(("B", "N" if first_slot else "N+1"))
    return step.finish({**{name: known[name] for name in _OUTPUTS}, **present})


def _presents(values: Values) -> Values:
    return {name: value for name, value in values.items() if name.startswith("present_")}


class _Step:
    """The graph that grows part by part."""

    def __init__(self) -> None:
        self._graph = ir.Graph([], [], nodes=[], name=names.STEP)
        self._constants: dict[tuple[object, ...], ir.Value] = {}
        self._version: tuple[int, int] | None = None  # of the ONNX format, of the operators

    def input(self, name: str, shape: Iterable[int | str], dtype: ir.DataType = ir.DataType.INT64) -> ir.Value:
        value = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))
        self._graph.inputs.append(value)
        return value

    def op(self, kind: str, *inputs: ir.Value, **attributes: int) -> ir.Value:
        """Append a node of our own."""
        number = len(self._graph)
        attrs = [ir.AttrInt64(key, value) for key, value in attributes.items()]
        node = ir.Node("", kind, inputs, attrs, name=f"{names.STEP}.{number}")
        node.outputs[0].name = f"{names.STEP}.value_{number}"
        self._graph.append(node)
        return node.outputs[0]

    def ints(self, *numbers: int) -> ir.Value:
        """A constant int64 vector."""
        name = f"{names.STEP}.ints_{'_'.join(map(str, numbers))}"
        tensor = ir.tensor(np.array(numbers, np.int64), name=name)
        type_ = ir.TensorType(ir.DataType.INT64)
        return self._constant(name, ir.Value(name=name, shape=tensor.shape, type=type_, const_value=tensor))

    def add(self, prefix: str, path: Path, known: Values, rename: Callable[[str], str] = str) -> Values:
        """Append a part, whose inputs are the values `known` by their names, or else inputs of the step.

        prefix: of all names inside. rename: what inputs of the step are called. Returns the outputs by name.
        """
        model = ir.load(path)
        part, outputs = model.graph, {str(value.name): value for value in model.graph.outputs}
        self._check_version(model, path)
        for value in part.inputs:
            name = str(value.name)
            assert value.shape is not None and value.dtype is not None
            there = known[name] if name in known else self.input(rename(name), _dims(value.shape), value.dtype)
            value.replace_all_uses_with(there)
        for name, value in part.initializers.items():
            value.replace_all_uses_with(self._constant(f"{prefix}.{name}", value))
        nodes = list(part)
        part.outputs.clear()
        part.remove(nodes)
        for node in nodes:
            node.name = f"{prefix}.{node.name}"
            for value in node.outputs:
                value.name = f"{prefix}.{value.name}"
                value.shape = _own_symbols(value.shape, prefix)
        self._graph.extend(nodes)
        return outputs

    def _check_version(self, model: ir.Model, path: Path) -> None:
        version = (model.ir_version, model.graph.opset_imports[""])
        before = self._version or version
        if (version[1] > names.INT4_OPSET) != (before[1] > names.INT4_OPSET):
            raise ExportError(f"{path} has opset {version[1]}, the graphs before it {before[1]}: mixed lowerings")
        self._version = max(before, version)  # decomposed graphs differ where one has INT4 weights

    def _constant(self, name: str, value: ir.Value) -> ir.Value:
        """An initializer of the step with this content; parts share the ones they have in common."""
        tensor = value.const_value
        assert tensor is not None
        key = _identity(value)
        if key is not None and key in self._constants:
            return self._constants[key]
        is_zero = value.name == names.ACTIVATION_ZERO and names.ACTIVATION_ZERO not in self._graph.initializers
        kept = names.ACTIVATION_ZERO if is_zero else name
        made = ir.Value(name=kept, shape=value.shape, type=value.type, const_value=tensor)
        tensor.name = kept
        self._graph.initializers[kept] = made
        if key is not None:
            self._constants[key] = made
        return made

    def finish(self, outputs: Values) -> ir.Model:
        """The model, with what several parts compute alike computed once."""
        for name, value in outputs.items():
            value.name = name
            self._graph.outputs.append(value)
        assert self._version is not None
        self._graph.opset_imports[""] = self._version[1]
        model = ir.Model(self._graph, ir_version=self._version[0], producer_name="xpress-export")
        passes.CommonSubexpressionEliminationPass()(model)
        passes.RemoveUnusedNodesPass()(model)
        return model


def _identity(value: ir.Value) -> tuple[object, ...] | None:
    """What two initializers have to share to be one; None: this one is its own.

    What a product dequantizes stays its own, though another may have the same codes: see `calibration.qdq`.
    """
    tensor = value.const_value
    assert tensor is not None
    shape = tuple(tensor.shape)
    if value.name != names.ACTIVATION_ZERO and any("Linear" in use.node.op_type for use in value.uses()):
        return None
    if isinstance(tensor, ir.ExternalTensor):
        return (tensor.dtype, shape, tensor.location, tensor.offset, tensor.length)
    return (tensor.dtype, shape, tensor.tobytes()) if tensor.nbytes <= _INLINE_BYTES else None


def _dims(shape: ir.Shape) -> list[int | str]:
    return [dim if isinstance(dim, int) else str(dim) for dim in shape]


def _own_symbols(shape: ir.Shape | None, prefix: str) -> ir.Shape | None:
    """A shape inside the step: what one part calls s5 is not what another calls so."""
    if shape is None:
        return None
    return ir.Shape([dim if isinstance(dim, int) or dim in _SYMBOLS else f"{prefix}.{dim}" for dim in _dims(shape)])
