"""A plan on its way to disk: written and hashed beside the builder, piece by piece."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

_PIECE_BYTES = 16 << 20


class PlanFile:
    """A file that TensorRT writes to; two threads write and hash what it hands over, so that it waits for neither.

    At most two pieces are held. After the `with` block the file is complete, and `sha256` and `num_bytes` are its own.
    """

    def __init__(self, path: Path) -> None:
        self.num_bytes, self.sha256 = 0, ""
        self._digest = hashlib.sha256()
        self._file = path.open("wb")
        self._pools = [ThreadPoolExecutor(1), ThreadPoolExecutor(1)]
        self._pending: list[Future[Any]] = []

    def __enter__(self) -> PlanFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._settle()
        finally:
            for pool in self._pools:
                pool.shutdown()
            self._file.close()
        self.sha256 = self._digest.hexdigest()

    def write(self, data: Any) -> int:
        """Take a piece over; an error of an earlier piece is raised here."""
        view = memoryview(data)
        self._settle()
        work: tuple[Callable[[Any], object], ...] = (self._file.write, self._digest.update)
        self._pending = [pool.submit(do, view) for pool, do in zip(self._pools, work, strict=True)]
        self.num_bytes += view.nbytes
        return view.nbytes

    def write_all(self, data: Any) -> None:
        """Write a whole plan that is in memory anyway."""
        view = memoryview(data)
        for start in range(0, view.nbytes, _PIECE_BYTES):
            self.write(view[start : start + _PIECE_BYTES])
        self._settle()

    def _settle(self) -> None:
        for future in self._pending:
            future.result()
        self._pending = []
