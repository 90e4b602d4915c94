"""A timeline of what runs where and when, in the Chrome trace format (ui.perfetto.dev and chrome://tracing read it).

One row for each stream of the device and one for the host. On the CPU spans are wall time, on a GPU they are between
events of the stream, so that a copy beside a verify step is seen beside it.
"""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

HOST = "host"


class Tracer:
    """Collects spans from any thread. Times are those of `time.perf_counter`, seconds."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._lock = threading.Lock()
        self._spans: list[tuple[str, str, float, float, dict[str, Any]]] = []

    def add(self, lane: str, name: str, start: float, end: float, **facts: Any) -> None:
        """A span of row `lane`; facts: numbers and words to show with it."""
        with self._lock:
            self._spans.append((lane, name, start, end, facts))

    def to_dict(self) -> dict[str, Any]:
        """The trace: complete events in microseconds since the tracer was made, and the names of the rows."""
        with self._lock:
            spans = sorted(self._spans, key=lambda span: span[2])
        lanes = {lane: i for i, lane in enumerate(dict.fromkeys((HOST, *(span[0] for span in spans))))}
        rows = [
            {"ph": "M", "name": "thread_name", "pid": 1, "tid": i, "args": {"name": lane}} for lane, i in lanes.items()
        ]
        events = [
            {
                "ph": "X",
                "name": name,
                "cat": lane,
                "pid": 1,
                "tid": lanes[lane],
                "ts": round(1e6 * (start - self._start), 1),
                "dur": round(1e6 * (end - start), 1),
                "args": facts,
            }
            for lane, name, start, end, facts in spans
        ]
        return {"displayTimeUnit": "ms", "traceEvents": rows + events}

    def write(self, path: Path) -> None:
        """The trace as a file."""
        path.write_text(json.dumps(self.to_dict()) + "\n", "utf-8")
