"""The runtime: opens a bundle and generates text by draft, refine, verify. Never imports torch or onnx."""

from xpress_export.runtime.api import Chunk, Generation, Result, Runtime
from xpress_export.runtime.params import SamplingParams
from xpress_export.runtime.stats import Stats

__all__ = ["Chunk", "Generation", "Result", "Runtime", "SamplingParams", "Stats"]
