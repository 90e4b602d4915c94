"""Doubles of CUDA and of what runs on it, importable by name: the tests' folders are no packages."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

for _name in ("fake_cuda", "fake_trt_runtime", "fake_ort_cuda"):
    _spec = importlib.util.spec_from_file_location(_name, Path(__file__).with_name(f"{_name}.py"))
    assert _spec is not None and _spec.loader is not None
    sys.modules[_name] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules[_name])
