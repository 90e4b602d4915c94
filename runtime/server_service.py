"""What the routes of a server share: the runtime, its running requests, its metrics, and whether requests are taken."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import hmac
import logging
import math
import time

from starlette.requests import Request

from xpress_export.errors import RequestError
from xpress_export.runtime.api import Runtime
from xpress_export.runtime.requests import Generation
from xpress_export.runtime.server_metrics import ServerMetrics
from xpress_export.runtime.server_replies import Json, error_body
from xpress_export.runtime.server_requests import Asked

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServiceOptions:
    """model_name: what clients call the model. api_keys: any of them opens /v1; none: open to all.

    default_max_tokens: of chats that name no limit; None: the rest of the context, which admission then reserves.
    max_body_bytes, body_timeout_s: limits of reading a request's body.
    """

    model_name: str
    api_keys: tuple[str, ...] = ()
    default_max_tokens: int | None = None
    max_body_bytes: int = 4 << 20
    body_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        if not self.model_name:
            raise RequestError("the served model needs a name", "model_name")
        if not all(self.api_keys):
            raise RequestError("an API key is empty; leave it out to serve without keys", "api_keys")


class HttpError(Exception):
    """An answer that is not 200."""

    def __init__(self, status: int, body: Json, headers: dict[str, str] | None = None) -> None:
        super().__init__(body["error"]["message"])
        self.status, self.body, self.headers = status, body, headers or {}


class Service:
    """What the routes share: the runtime, its running requests, the metrics, and whether requests are still taken."""

    def __init__(self, runtime: Runtime, options: ServiceOptions) -> None:
        self.runtime, self.options = runtime, options
        self.metrics = ServerMetrics(runtime)
        self.fingerprint = f"fp_{runtime.manifest.digest[:12]}"
        self.draining = False
        self._running: set[Generation] = set()
        self._keys = [_digest(key.encode()) for key in options.api_keys]
        self._mean_s = 1.0  # how long an answer takes, smoothed

    @property
    def ready(self) -> bool:
        return not self.draining and not self.runtime.closed

    async def drain(self, seconds: float) -> None:
        """Take no more requests, give running ones `seconds` to end, then cancel what is left."""
        self.draining = True
        deadline = time.monotonic() + seconds
        while self._running and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        if self._running:
            logger.warning("cancelling %d requests that did not end in %g s", len(self._running), seconds)
        self.cancel_all()

    def cancel_all(self) -> None:
        """End every running request now; its client is told."""
        self.draining = True
        for generation in list(self._running):
            generation.cancel()

    def authorize(self, request: Request) -> None:
        """Compare the bearer token with every key, each in constant time. Raises HttpError 401."""
        if not self._keys:
            return
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        given = _digest(token.strip().encode("latin-1"))  # as it came: headers are bytes
        matches = [hmac.compare_digest(given, key) for key in self._keys]
        if scheme.lower() != "bearer" or not any(matches):
            what = "wrong API key" if token else "no API key: send the header `Authorization: Bearer KEY`"
            body = error_body(what, "invalid_request_error", code="invalid_api_key")
            raise HttpError(401, body, {"WWW-Authenticate": "Bearer"})

    async def start(self, asked: Asked) -> Generation:
        """Hand a request to the runtime; tokenising a long prompt holds up no one else."""
        if asked.model not in (None, self.options.model_name):
            message = f"model {asked.model!r} is not served here; this server has {self.options.model_name!r}"
            raise HttpError(404, error_body(message, "invalid_request_error", "model", "model_not_found"))
        if not self.ready:
            raise unavailable()
        generation = await asyncio.to_thread(self._submit, asked)
        self._running.add(generation)
        return generation

    def ended(self, route: str, outcome: str, started: float, generation: Generation | None) -> None:
        """Count a request that is over, and free what it held."""
        took = time.monotonic() - started
        if generation is not None:
            generation.cancel()  # does nothing to one that ended by itself
            self._running.discard(generation)
        if outcome in ("stop", "length"):
            self._mean_s += 0.1 * (took - self._mean_s)
        stats = generation.stats if generation is not None else None
        self.metrics.ended(route, outcome, took, stats)
        if stats is not None:
            logger.info(
                "%s %s in %.2f s: %d prompt and %d new tokens, tau %.2f",
                *(route, outcome, took, stats.num_prompt_tokens, stats.num_generated_tokens, stats.tau),
            )

    def retry_after_s(self) -> int:
        """When a place in the queue should be free: whole seconds, 1 to 60."""
        stats = self.runtime.stats
        return min(60, max(1, math.ceil(self._mean_s / max(1, stats.num_slots))))

    def _submit(self, asked: Asked) -> Generation:
        runtime, prompt, params = self.runtime, asked.prompt, asked.params
        if isinstance(prompt, str):
            prompt = runtime.codec.encode(prompt)  # a completion continues the text as it is
            if not prompt:
                raise RequestError("prompt is empty", "prompt")
        ids = runtime.encode(prompt, **asked.template_args)
        room = runtime.max_context - len(ids)
        if params.max_new_tokens is None and self.options.default_max_tokens is not None and room > 0:
            most = min(self.options.default_max_tokens, room)
            params = dataclasses.replace(params, max_new_tokens=most)
        return runtime.submit(ids, params)


def _digest(key: bytes) -> bytes:
    """Of equal length for all keys, so that comparing tells nothing of it either."""
    return hashlib.sha256(key).digest()


def unavailable() -> HttpError:
    """503: shutting down."""
    body = error_body("the server is shutting down", "server_error", code="unavailable")
    return HttpError(503, body, {"Retry-After": "5"})
