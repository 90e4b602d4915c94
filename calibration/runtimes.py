"""The bundle's own runtime on graphs of one's choice, one request at a time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from xpress_export.manifest import Manifest
from xpress_export.runtime import Result, Runtime, SamplingParams
from xpress_export.runtime.api import PREFILL_CHUNK, host_decoder
from xpress_export.runtime.backend import Graph
from xpress_export.runtime.resident_memory import Shape
from xpress_export.runtime.text import TextCodec


def runtime_of(folder: Path, manifest: Manifest, graphs: Mapping[str, Graph]) -> Runtime:
    """A runtime of the bundle in `folder` that runs `graphs`, one for each of its models."""
    codec = TextCodec.open(folder / manifest.text.folder)
    shape = Shape.of(manifest, num_slots=1, chunk=PREFILL_CHUNK)
    return Runtime(manifest, codec, host_decoder(folder, manifest, graphs, shape), num_slots=1)


def answer(runtime: Runtime, prompt: str, max_new_tokens: int, mode: str | None = None) -> Result:
    """The greedy answer to a prompt; mode None: the fullest that the runtime has, every block whole."""
    params = SamplingParams(max_new_tokens=max_new_tokens, mode=mode or runtime.modes[-1])
    return runtime.generate(prompt, params).result()
