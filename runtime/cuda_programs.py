"""Graphs on a GPU, as `device_cuda` runs them whatever the backend."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from xpress_export.errors import EngineError
from xpress_export.runtime.device import Bound, Program

if TYPE_CHECKING:
    from xpress_export.runtime.device_cuda import CudaStream


class NotReadyError(EngineError):
    """A graph cannot be captured before it ran once on these buffers; nothing is wrong with it."""


class CudaBound(Bound):
    """A graph on fixed buffers of the GPU."""

    @abstractmethod
    def enqueue(self, stream: CudaStream, label: str, *, repeats: bool) -> None:
        """Put it on the compute stream. repeats: it will be captured, or is being so.

        Raises NotReadyError, while the stream is capturing, for what has to run once before.
        """

    def why_not_captured(self, stream: CudaStream) -> str | None:
        """Why it must not be part of a CUDA graph, None where it may."""
        return None


class CudaProgram(Program):
    """A loaded graph or engine."""

    @abstractmethod
    def close(self) -> None:
        """Give back what the library holds for it."""
