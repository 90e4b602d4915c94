"""The GPU of this machine, asked of the driver itself: no CUDA package is needed."""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass
from pathlib import Path

_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*
_VERSION_FILE = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class Gpu:
    """name: as the driver calls it. sm: 89 for compute capability 8.9. driver: its major version, None if unknown."""

    name: str
    sm: int
    driver: int | None


def find_gpu(index: int = 0) -> Gpu | None:
    """The GPU with that index, or None where there is no driver or no such GPU."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device = ctypes.c_int()
    if cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), index):
        return None
    values = []
    for attribute in (_MAJOR, _MINOR):
        value = ctypes.c_int()
        if cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, device):
            return None
        values.append(value.value)
    name = ctypes.create_string_buffer(128)
    cuda.cuDeviceGetName(name, 128, device)
    return Gpu(name.value.decode(errors="replace"), values[0] * 10 + values[1], _driver_major())


def _driver_major() -> int | None:
    try:
        match = re.search(r"\s(\d{3,})\.\d+", _VERSION_FILE.read_text())
    except OSError:
        return None
    return int(match[1]) if match else None
