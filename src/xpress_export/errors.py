"""Every error a user can meet, as one tree.

    XpressExportError              base: the command line prints the message and exits 1, no traceback
    ├── CheckpointError            a target, drafter or refiner checkpoint cannot be read or does not fit
    ├── ExportError                tracing, writing or checking a graph failed
    │   └── ParityError            a graph was traced but its numbers are not those of the model
    ├── CalibrationError           prompts, scales or a graph do not allow what was asked of quantization
    ├── BundleError                a bundle is missing, incomplete, tampered with or of another schema
    ├── PlatformError              the named platform cannot do what was asked
    ├── RequestError               a generation request is not valid (empty prompt, too long, unknown mode)
    │   ├── QueueFullError         as many requests wait as the runtime was opened for; try again later
    │   └── ClosedError            the runtime was closed, before or while the request ran
    ├── EngineError                an engine call failed while generating
    │   └── DeviceLostError        the GPU failed so that this process cannot use it any more
    ├── EngineBuildError           TensorRT could not build an engine, or built another one than was asked
    ├── PlanMismatchError          an engine plan is for another TensorRT, GPU or driver than this
    └── MissingDependencyError     an optional package is not installed

Messages say what failed, where, expected and got, and what to do about it.
"""

from __future__ import annotations


class XpressExportError(Exception):
    """Base of all errors that are the user's to read and act on."""


class CheckpointError(XpressExportError):
    """A checkpoint is unreadable, malformed or does not fit the other models of the trio."""


class ExportError(XpressExportError):
    """A graph could not be traced or written."""


class ParityError(ExportError):
    """A traced graph does not reproduce its model within the stated tolerance."""


class CalibrationError(XpressExportError):
    """Ranges cannot be measured, or scales and options do not fit the graphs they are for."""


class BundleError(XpressExportError):
    """A bundle is missing, damaged, tampered with, or written by another schema version."""


class PlatformError(XpressExportError):
    """The platform is unknown or cannot do what was asked of it."""


class RequestError(XpressExportError):
    """A generation request cannot be honoured as given.

    field: the request's field that is wrong, where it is one; the message always names it too.
    """

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class QueueFullError(RequestError):
    """The runtime's queue is full; nothing is wrong with the request, a later try may succeed."""


class ClosedError(RequestError):
    """The runtime is closed."""


class EngineError(XpressExportError):
    """An engine call failed during generation."""


class DeviceLostError(EngineError):
    """The GPU is in a state that only a new process gets out of; nothing else can run on it here."""


class MissingDependencyError(XpressExportError):
    """An optional dependency is needed and not installed."""

    def __init__(self, package: str, purpose: str, extra: str) -> None:
        super().__init__(
            f"{package} is needed to {purpose} but is not installed; "
            f"install it with: pip install 'xpress-export[{extra}]'"
        )


class EngineBuildError(XpressExportError):
    """TensorRT could not build an engine, or built one that is not what was asked."""


class PlanMismatchError(XpressExportError):
    """An engine plan was built for another TensorRT, GPU or driver than the one that should load it."""
