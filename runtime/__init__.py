"""The runtime: opens a bundle and generates text by draft, refine, verify. Never imports torch or onnx."""

from xpress_export.runtime.api import Runtime
from xpress_export.runtime.params import SamplingParams
from xpress_export.runtime.requests import Chunk, Generation, Result
from xpress_export.runtime.sampling import TokenLogprobs
from xpress_export.runtime.stats import RuntimeStats, Stats

__all__ = ["Chunk", "Generation", "Result", "Runtime", "RuntimeStats", "SamplingParams", "Stats", "TokenLogprobs"]
