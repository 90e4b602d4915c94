"""The process that builds one engine: `python -m xpress_export.engines.worker`, a job on standard input.

Standard output carries one JSON object a line: `{"phase", "share"}` while it builds, then `{"result"}` or
`{"error", "out_of_memory"}`. Exit code 0 goes with a result, 1 with an error; anything else is a death. All memory
that TensorRT took goes with the process, and the process goes with its parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import time
from dataclasses import asdict
from typing import Any, TextIO

from xpress_export.errors import XpressExportError

_PR_SET_PDEATHSIG = 1
_EVERY_S = 0.1
OUT_OF_MEMORY = ("OutOfMemory", "out of memory", "bad_alloc", "Cannot allocate memory")


def main() -> int:
    """Build the job on standard input."""
    parent = int(sys.argv[1]) if len(sys.argv) > 1 else os.getppid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    _die_with(parent)
    events = _take_stdout()
    from xpress_export.engines import libraries
    from xpress_export.engines.builder import engine_from_onnx
    from xpress_export.engines.job import BuildJob

    try:
        job = BuildJob.from_json(sys.stdin.read())
        result = engine_from_onnx(libraries.load(job.backend), job, _Throttled(events))
    except (XpressExportError, MemoryError, OSError) as err:
        text = str(err) or "out of memory"
        is_memory = isinstance(err, MemoryError) or any(sign in text for sign in OUT_OF_MEMORY)
        _send(events, {"error": text, "out_of_memory": is_memory})
        return 1
    _send(events, {"result": asdict(result)})
    return 0


def _die_with(parent: int) -> None:
    """Ask the kernel to end this process when its parent ends, and see whether that has happened already."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _take_stdout() -> TextIO:
    """Keep standard output for events; whatever a library prints goes to standard error."""
    sys.stdout.flush()
    events = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return events


class _Throttled:
    """A build listener that reports a few times a second: TensorRT's phases have thousands of steps."""

    def __init__(self, events: TextIO) -> None:
        self._events, self._last = events, 0.0

    def __call__(self, phase: str, share: float) -> None:
        now = time.monotonic()
        if now - self._last >= _EVERY_S:
            self._last = now
            _send(self._events, {"phase": phase, "share": round(share, 4)})


def _send(events: TextIO, event: dict[str, Any]) -> None:
    events.write(json.dumps(event) + "\n")
    events.flush()


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # everything is written; taking TensorRT down object by object would only take time
