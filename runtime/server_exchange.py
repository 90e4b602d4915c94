"""One POST to a completion route: from its bytes to the last byte of its answer, whole or as server-sent events.

A client that leaves is noticed at once, queued or running, and its request is cancelled. However an exchange ends, it
is counted exactly once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from xpress_export.errors import ClosedError, QueueFullError, RequestError, XpressExportError
from xpress_export.runtime.requests import Chunk, Generation
from xpress_export.runtime.server_replies import (
    DONE,
    KEEP_ALIVE,
    ChatReply,
    CompletionReply,
    Reply,
    as_json,
    error_body,
    event,
)
from xpress_export.runtime.server_requests import Asked, ChatBody, CompletionBody, in_body_terms, parse
from xpress_export.runtime.server_service import HttpError, Service, unavailable

logger = logging.getLogger(__name__)
KEEP_ALIVE_S = 15.0
CLIENT_GONE = 499
"""What nginx logs for it; nobody is left to read the status."""
KINDS: dict[str, type[ChatBody] | type[CompletionBody]] = {"chat": ChatBody, "completions": CompletionBody}
_STATUS: dict[type, int] = {QueueFullError: 429, ClosedError: 503, RequestError: 400}
_OUTCOMES = {401: "unauthorized", 429: "queue_full", 503: "unavailable", CLIENT_GONE: "cancelled", 500: "error"}


class Exchange:
    """One POST: from its bytes to its last byte, counted exactly once."""

    def __init__(self, service: Service, route: str, request: Request) -> None:
        self._service, self._route, self._request = service, route, request
        self._started = time.monotonic()
        self._generation: Generation | None = None
        self._ended = False

    async def answer(self) -> Response:
        try:
            self._service.authorize(self._request)
            asked = parse(KINDS[self._route], await self._body())
            self._generation = await self._start(asked)
            reply = self._reply(asked)
            if asked.stream:
                return _EventStream(self._events(reply), lambda: self._end("cancelled"))
            return Response(await self._whole(reply), media_type="application/json")
        except BaseException as error:
            self._end(_OUTCOMES.get(self._status_of(error), "refused"))
            if isinstance(error, ClientDisconnect):
                return Response(status_code=CLIENT_GONE)
            if isinstance(error, HttpError) or not isinstance(error, Exception):
                raise
            raise self._as_http(error) from error

    async def _body(self) -> bytes:
        most = self._service.options.max_body_bytes
        data = bytearray()
        try:
            async with asyncio.timeout(self._service.options.body_timeout_s):
                async for part in self._request.stream():
                    data += part
                    if len(data) > most:
                        raise HttpError(
                            413,
                            error_body(f"the body is larger than {most} bytes", "invalid_request_error"),
                            {"Connection": "close"},
                        )
        except TimeoutError as error:
            body = error_body("the body did not arrive in time", "invalid_request_error")
            raise HttpError(408, body, {"Connection": "close"}) from error
        return bytes(data)

    async def _start(self, asked: Asked) -> Generation:
        try:
            return await self._service.start(asked)
        except (QueueFullError, ClosedError):
            raise
        except RequestError as error:
            raise in_body_terms(error, KINDS[self._route]) from error

    def _reply(self, asked: Asked) -> Reply:
        service = self._service
        return (ChatReply if asked.is_chat else CompletionReply)(
            service.runtime.codec,
            service.options.model_name,
            service.fingerprint,
            logprobs=asked.num_top_logprobs is not None,
            with_usage=asked.include_usage,
        )

    async def _whole(self, reply: Reply) -> bytes:
        assert self._generation is not None
        gone = asyncio.ensure_future(_gone(self._request))
        try:
            result = await _first(self._generation.aresult(), gone)
        finally:
            gone.cancel()
        if result.finish_reason == "cancelled":
            raise unavailable()
        data = as_json(reply.whole(result))
        self._end(result.finish_reason)
        return data

    async def _events(self, reply: Reply) -> AsyncGenerator[bytes]:
        """The events of a stream. An error after the first byte is an event too: the status is long sent."""
        generation = self._generation
        assert generation is not None
        gone = asyncio.ensure_future(_gone(self._request))
        outcome = "cancelled"
        try:
            for body in reply.opening():
                yield event(body)
            async for chunk in _chunks(generation, gone):
                for body in reply.part(chunk) if chunk is not None else ():
                    yield event(body)
                if chunk is None:
                    yield KEEP_ALIVE
            if generation.finish_reason in (None, "cancelled"):
                raise unavailable()
            outcome = generation.finish_reason
            for body in reply.closing(outcome, generation.stats):
                yield event(body)
            yield DONE
        except ClientDisconnect:
            pass
        except Exception as error:
            http = error if isinstance(error, HttpError) else self._as_http(error)
            outcome = _OUTCOMES.get(http.status, "refused")
            yield event(http.body)
        finally:
            gone.cancel()
            self._end(outcome)

    def _end(self, outcome: str) -> None:
        """Count this exchange; the first call decides."""
        if not self._ended:
            self._ended = True
            self._service.ended(self._route, outcome, self._started, self._generation)

    def _status_of(self, error: BaseException) -> int:
        if isinstance(error, ClientDisconnect | asyncio.CancelledError):
            return CLIENT_GONE
        if isinstance(error, HttpError):
            return error.status
        kind = _kind(error)
        return 500 if kind is None else _STATUS[kind]

    def _as_http(self, error: Exception) -> HttpError:
        kind = _kind(error)
        if kind is QueueFullError:
            body = error_body(str(error), "rate_limit_error", code="queue_full")
            return HttpError(_STATUS[kind], body, {"Retry-After": str(self._service.retry_after_s())})
        if kind is ClosedError:
            return unavailable()
        if isinstance(error, RequestError):
            return HttpError(_STATUS[RequestError], error_body(str(error), "invalid_request_error", error.field))
        is_ours = isinstance(error, XpressExportError)  # with a message for the user; the rest are defects
        logger.error("a request failed: %s", error, exc_info=None if is_ours else error)
        return HttpError(
            500, error_body(str(error) if is_ours else "internal error", "server_error", code="internal_error")
        )


class _EventStream(Response):
    """Server-sent events, each sent as it comes. What makes them watches for the client's leaving.

    on_end: called when nothing more will be sent, even where nothing ever was.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes], on_end: Callable[[], None]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._events, self._on_end = events, on_end

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            async with contextlib.aclosing(self._events) as events:
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                async for data in events:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._on_end()


def _kind(error: BaseException) -> type | None:
    """The most special class of `_STATUS` that an error is of."""
    return next((kind for kind in _STATUS if isinstance(error, kind)), None)


async def _gone(request: Request) -> None:
    """Return when the client has left."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _first(work: Awaitable[Any], gone: asyncio.Future[None]) -> Any:
    """The result of `work`. Raises ClientDisconnect, and cancels it, if `gone` comes first."""
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()


async def _chunks(generation: Generation, gone: asyncio.Future[None]) -> AsyncIterator[Chunk | None]:
    """The chunks as they come, None whenever none has come for a while. Raises ClientDisconnect."""
    task: asyncio.Task[Chunk | None] | None = None
    try:
        while True:
            if task is None:
                task = asyncio.ensure_future(_next(generation))
            either: set[asyncio.Future[Any]] = {task, gone}
            await asyncio.wait(either, timeout=KEEP_ALIVE_S, return_when=asyncio.FIRST_COMPLETED)
            if gone.done():
                raise ClientDisconnect
            if not task.done():
                yield None
                continue
            chunk, task = task.result(), None
            if chunk is None:
                return
            yield chunk
    finally:
        if task is not None:
            task.cancel()


async def _next(generation: Generation) -> Chunk | None:
    """The next chunk, None at the end."""
    return await anext(aiter(generation), None)
