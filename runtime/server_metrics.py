"""Prometheus metrics of one server, in a registry of its own: two servers in one process never mix.

Requests are counted by the server as they end; everything else is read from `Runtime.stats` when scraped.
Times are in seconds, as Prometheus has it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

if TYPE_CHECKING:
    from xpress_export.runtime.api import Runtime
    from xpress_export.runtime.stats import Stats

CONTENT_TYPE = CONTENT_TYPE_LATEST
OUTCOMES = ("stop", "length", "cancelled", "refused", "unauthorized", "queue_full", "unavailable", "error")
_STAGES = ("prefill", "draft", "refine", "verify", "host")
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_TAUS = (1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6, 8, 10, 12, 16)


class ServerMetrics:
    """Counts requests as they end, and renders everything."""

    def __init__(self, runtime: Runtime) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "xpress_requests",
            "Requests that ended, by route and outcome.",
            ["route", "outcome"],
            registry=self.registry,
        )
        for route in ("chat", "completions"):
            for outcome in OUTCOMES:
                self.requests.labels(route, outcome)
        self._tau = self._histogram("xpress_tau", "Tokens per verify step of a request.", _TAUS)
        self._cycle = self._histogram("xpress_cycle_seconds", "Mean draft-refine-verify cycle of a request.", _SECONDS)
        self._ttft = self._histogram("xpress_time_to_first_token_seconds", "Arrival to first token.", _SECONDS)
        self._queue = self._histogram("xpress_queue_seconds", "Arrival to a slot.", _SECONDS)
        self._duration = self._histogram("xpress_request_seconds", "Arrival to end of an answered request.", _SECONDS)
        self.registry.register(_RuntimeCollector(runtime))

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, buckets=buckets, registry=self.registry)

    def ended(self, route: str, outcome: str, duration_s: float, stats: Stats | None = None) -> None:
        """Count one request. stats: of a generation, however it ended; None if none began."""
        self.requests.labels(route, outcome).inc()
        if outcome in ("stop", "length"):
            self._duration.observe(duration_s)
        if stats is None or not stats.num_generated_tokens:
            return
        self._ttft.observe(stats.ttft_ms / 1e3)
        self._queue.observe(stats.queue_ms / 1e3)
        if stats.num_verify_steps:
            self._tau.observe(stats.tau)
            self._cycle.observe(stats.decode_ms / stats.num_verify_steps / 1e3)

    def render(self) -> bytes:
        """The text that Prometheus reads."""
        return generate_latest(self.registry)


class _RuntimeCollector:
    """Reads one `RuntimeStats` snapshot per scrape."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def describe(self) -> Iterable[Metric]:
        """Nothing to check names against: registering must not scrape."""
        return ()

    def collect(self) -> Iterable[Metric]:
        stats = self._runtime.stats
        gauges = (
            ("xpress_requests_running", "Requests that hold a slot.", stats.num_running),
            ("xpress_requests_waiting", "Requests in the queue.", stats.num_waiting),
            ("xpress_slots", "Slots.", stats.num_slots),
            ("xpress_kv_rows_used", "Committed rows of running requests.", stats.kv_rows_used),
            ("xpress_kv_rows_capacity", "Rows of each slot's cache as it is now.", stats.kv_capacity),
            ("xpress_kv_bytes", "Memory of the caches.", stats.kv_bytes),
        )
        for name, text, value in gauges:
            yield GaugeMetricFamily(name, text, value=value)
        counters = (
            ("xpress_prompt_tokens", "Prompt tokens read.", stats.num_prompt_tokens),
            ("xpress_generated_tokens", "Tokens generated.", stats.num_generated_tokens),
            ("xpress_cycles", "Cycles of the scheduler.", stats.num_cycles),
            ("xpress_verify_steps", "Verify steps, over all requests.", stats.num_verify_steps),
            ("xpress_draft_tokens", "Draft tokens verified.", stats.num_draft_tokens),
            ("xpress_accepted_tokens", "Draft tokens accepted.", stats.num_accepted),
        )
        for name, text, value in counters:
            yield CounterMetricFamily(name, text, value=value)
        stages = CounterMetricFamily("xpress_stage_seconds", "Time by stage of the cycle.", labels=["stage"])
        for stage in _STAGES:
            stages.add_metric([stage], getattr(stats, f"{stage}_ms") / 1e3)
        yield stages
