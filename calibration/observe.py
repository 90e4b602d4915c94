"""Watch tensors of a graph while the runtime generates with it.

An `ObservedGraph` is a `Graph` of the runtime with more outputs; every call made through it hands the watched tensors
to a listener. So calibration sees what the deployed system computes: prefill chunks, verify blocks, draft contexts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from xpress_export.runtime import backend
from xpress_export.runtime.backend import Call, Graph

Array = NDArray[Any]
Listener = Callable[[Mapping[str, Array]], None]
"""Receives the watched tensors of one call, by name; they are only valid during the call."""


class ObservedGraph(Graph):
    """A graph whose calls also deliver `tensors`. listener: may be replaced between calls."""

    def __init__(
        self, path: Path, role: str, tensors: Sequence[str], listener: Listener, num_threads: int | None = None
    ) -> None:
        self.role, self.tensors, self.listener = role, tuple(tensors), listener
        self.session = open_session(path, tensors, num_threads)
        own = [*self.session.get_inputs(), *self.session.get_outputs()]
        self.shapes = {value.name: value.shape for value in own}

    def call(self) -> Call:
        return _ObservedCall(self)


class _ObservedCall(Call):
    """Binds outputs anew at every run, the watched ones first: their sizes change from call to call."""

    def __init__(self, graph: ObservedGraph) -> None:
        super().__init__(graph)
        self._watching, self._fetched, self._fed = graph, dict[str, Array](), dict[str, Array]()

    def bind_input(self, name: str, array: Array) -> None:
        super().bind_input(name, array)
        if name in self._watching.tensors:
            self._fed[name] = array

    def bind_output(self, name: str, array: Array) -> None:
        assert array.flags.c_contiguous, f"{name} is not contiguous"
        self._fetched[name] = array

    def run(self) -> None:
        known = self._fetched | self._fed
        watched = [name for name in self._watching.tensors if name not in known]
        self._io.clear_binding_outputs()
        for name in watched:
            self._io.bind_output(name)
        for name, array in self._fetched.items():
            self._io.bind_output(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
        super().run()
        values = dict(zip(watched, (value.numpy() for value in self._io.get_outputs()), strict=False))
        bound = {name: known[name] for name in self._watching.tensors if name in known}
        self._watching.listener({**values, **bound})


def open_session(path: Path, tensors: Sequence[str] = (), num_threads: int | None = None) -> Any:
    """An ONNX Runtime session of a graph file with additional outputs; its weights stay where they are."""
    import onnx

    model = onnx.load(path, load_external_data=False)
    present = {value.name for value in (*model.graph.output, *model.graph.input)}
    for name in tensors:
        if name not in present:
            model.graph.output.append(onnx.ValueInfoProto(name=name))
    return backend.open_session(model.SerializeToString(), path, num_threads, exact=True)
