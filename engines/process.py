"""A build in a process of its own: its progress, its result, and what its death means."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import IO, Any

from xpress_export.console import human_bytes
from xpress_export.engines import memory
from xpress_export.engines.builder import Listener
from xpress_export.engines.job import BuildJob, BuildResult
from xpress_export.errors import EngineBuildError

_TAIL_BYTES = 2000


class Workers:
    """The worker processes of one compilation, so that all of them can be ended from another thread."""

    def __init__(self) -> None:
        self._running: set[subprocess.Popen[str]] = set()
        self._ended = False

    def kill(self) -> None:
        """End all workers, those that are about to start included."""
        self._ended = True
        for process in tuple(self._running):
            process.kill()

    @contextlib.contextmanager
    def watch(self, process: subprocess.Popen[str]) -> Iterator[None]:
        self._running.add(process)
        if self._ended:
            process.kill()
        try:
            yield
        finally:
            self._running.discard(process)


def build_in_subprocess(job: BuildJob, listener: Listener, weight_bytes: int, workers: Workers) -> BuildResult:
    """Run the worker on `job` and wait for it; on any exception here, Ctrl-C included, the worker is killed.

    weight_bytes: for the estimate that a message about memory gives.
    """
    kills = memory.oom_kills()
    command = [sys.executable, "-m", "xpress_export.engines.worker", str(os.getpid())]
    with tempfile.TemporaryFile() as log:
        pipe = subprocess.PIPE
        with (
            subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=log, text=True) as process,
            workers.watch(process),
        ):
            try:
                last = _converse(process, job, listener)
                code = process.wait()
            except BaseException:
                process.kill()
                raise
        if code == 0 and "result" in last:
            return BuildResult.from_raw(last["result"])
        raise EngineBuildError(_why(job, code, last, _tail(log), memory.oom_kills() > kills, weight_bytes))


def _converse(process: subprocess.Popen[str], job: BuildJob, listener: Listener) -> dict[str, Any]:
    """Send the job, pass progress on, and return the worker's last word."""
    assert process.stdin is not None and process.stdout is not None
    with contextlib.suppress(BrokenPipeError):  # died at once: its exit code tells
        process.stdin.write(job.to_json())
        process.stdin.close()
    last: dict[str, Any] = {}
    for line in process.stdout:
        event = json.loads(line)
        if "phase" in event:
            listener(event["phase"], event["share"])
        else:
            last = event
    return last


def _tail(log: IO[bytes]) -> str:
    log.seek(0, os.SEEK_END)
    log.seek(max(0, log.tell() - _TAIL_BYTES))
    return log.read().decode(errors="replace").strip()


def _why(job: BuildJob, code: int, last: dict[str, Any], tail: str, oom_kill: bool, weight_bytes: int) -> str:
    """What to tell about a worker that gave no result."""
    estimate = human_bytes(memory.estimate_bytes(job.backend, weight_bytes))
    if last.get("out_of_memory") or oom_kill or code == -signal.SIGKILL:
        free = memory.available_bytes()
        now = f"; {human_bytes(free)} are free now" if free is not None else ""
        how = "was killed, as the system does when memory runs out" if code < 0 else "ran out of memory"
        return f"building the {job.role} engine {how} (it needs about {estimate}{now}); {memory.advice()}"
    if "error" in last:
        return str(last["error"])
    if code < 0:
        return f"building the {job.role} engine ended with {signal.Signals(-code).name} inside TensorRT: {tail}"
    return f"building the {job.role} engine ended with exit code {code}: {tail}"
