"""ONNX Runtime on CPU behind a narrow interface: load a graph, bind named buffers, run.

A `Graph` is loaded once. A `Call` is one set of bound buffers, such as those of a range of slots: it remembers what
is bound, so that a call of the same shape binds nothing again. Inputs and outputs live in the caller's numpy arrays;
binding a cache array as `past_*` and `present_*` makes the update in place.
"""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

from xpress_export.errors import BundleError, EngineError, MissingDependencyError
from xpress_export.runtime.device import Array
from xpress_export.runtime.kernels import lower

_WEIGHTS_FOLDER = "session.model_external_initializers_file_folder_path"
_CONFIG = {"session.intra_op.allow_spinning": "1", "session.force_spinning_stop": "1"}


def open_session(model: bytes, path: Path, num_threads: int | None = None, *, exact: bool = False) -> Any:
    """A session of a serialized graph; `path` names it in errors, its folder holds the weights. exact: see `kernels`.

    num_threads: None, one per core. Within a call they spin from one operator to the next, which makes a verify step
    5% shorter than if they slept. Between calls they sleep: threads that spin while they wait for the next call steal
    the cores from the other graphs of a trio, which take turns (a verify step took 2.7 times as long).
    """
    try:
        import onnxruntime as ort
    except ImportError as err:
        raise MissingDependencyError("onnxruntime", "run a bundle on this machine", "cpu") from err
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = num_threads or 0
    model, config = lower(model, exact=exact)
    for key, value in {**_CONFIG, **config, _WEIGHTS_FOLDER: str(path.parent)}.items():
        options.add_session_config_entry(key, value)
    try:
        return _session(ort, model, options)
    except Exception as err:  # onnxruntime raises plain classes of its own, without a common base
        raise BundleError(f"ONNX Runtime cannot load {path}: {_first_line(err)}") from err


def _session(ort: Any, model: bytes, options: Any) -> Any:
    """With threads of its own, or those that the process shares where something else in it has made such a pool."""
    try:
        return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"], enable_fallback=0)
    except RuntimeError as err:
        if "global thread pool" not in str(err):
            raise
    options.use_per_session_threads = False
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"], enable_fallback=0)


class Graph:
    """One ONNX graph, ready to run. role: names it in errors. exact: slower than it might be, see `kernels`."""

    def __init__(self, path: Path, role: str, num_threads: int | None = None, *, exact: bool = False) -> None:
        self.session = open_session(path.read_bytes(), path, num_threads, exact=exact)
        self.role = role
        self.shapes: dict[str, list[int | str]] = {
            value.name: value.shape for value in (*self.session.get_inputs(), *self.session.get_outputs())
        }

    def call(self) -> Call:
        """Buffers bound for repeated runs of this graph."""
        return Call(self)

    def has(self, name: str) -> bool:
        """Whether the graph has an input or output of that name."""
        return name in self.shapes

    def size(self, name: str, axis: int) -> int:
        """A static dimension of an input or output."""
        dim = self.shapes[name][axis]
        assert isinstance(dim, int), f"{self.role} {name} axis {axis} is dynamic"
        return dim


class Call:
    """Bound buffers of one graph."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._io = graph.session.io_binding()
        self._bound: dict[tuple[str, str], tuple[int, tuple[int, ...]]] = {}
        self._arrays: dict[tuple[str, str], weakref.ref[Array]] = {}

    def bind_input(self, name: str, array: Array) -> None:
        """Bind a contiguous array; the caller keeps it alive and may change its contents between runs."""
        if self._is_new("in", name, array):
            self._io.bind_input(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)

    def bind_output(self, name: str, array: Array) -> None:
        """Bind a contiguous array that the next run fills."""
        if self._is_new("out", name, array):
            self._io.bind_output(name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data)

    def _is_new(self, side: str, name: str, array: Array) -> bool:
        if (last := self._arrays.get((side, name))) is not None and last() is array:
            return False
        assert array.flags.c_contiguous, f"{name} is not contiguous"
        self._arrays[side, name] = weakref.ref(array)
        what = (array.__array_interface__["data"][0], array.shape)
        if self._bound.get((side, name)) == what:
            return False
        self._bound[side, name] = what
        return True

    def run(self) -> None:
        """Run the graph on what is bound. Returns when the outputs are complete."""
        try:
            self.graph.session.run_with_iobinding(self._io)
        except Exception as err:  # as above: no common base class
            raise EngineError(f"the {self.graph.role} graph failed: {_first_line(err)}") from err


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
