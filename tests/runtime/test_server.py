"""The HTTP side of the server, over a runtime whose requests do what a test tells them.

Requests are the real ones, with real handles; only what would run them is a stand-in. Connections are real too.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from xpress_export.errors import ClosedError, EngineError, QueueFullError, RequestError
from xpress_export.runtime import server_exchange
from xpress_export.runtime.requests import Chunk, Generation, Request
from xpress_export.runtime.sampling import TokenLogprobs
from xpress_export.runtime.server_run import Server, listen
from xpress_export.runtime.server_service import Service, ServiceOptions
from xpress_export.runtime.stats import RuntimeStats, Stats
from xpress_export.runtime.text import TextCodec

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
PATIENCE_S = 10.0


class StubRuntime:
    """Takes requests and leaves them to the test. refuse: raised by the next submission."""

    modes = ("target",)
    max_context = 64

    def __init__(self, codec: TextCodec) -> None:
        self.codec, self.closed = codec, False
        self.manifest = SimpleNamespace(digest="0123456789abcdef")
        self.stats = RuntimeStats(num_slots=2, num_running=1, kv_bytes=4096, num_generated_tokens=5)
        self.requests: list[Request] = []
        self.refuse: Exception | None = None

    def encode(self, prompt: Any, **template_args: Any) -> list[int]:
        return prompt if isinstance(prompt[0], int) else self.codec.encode_chat(prompt, **template_args)

    def submit(self, prompt: list[int], params: Any) -> Generation:
        if self.refuse is not None:
            raise self.refuse
        stats = Stats(num_prompt_tokens=3, mode="target", queue_ms=1.0, ttft_ms=2.0)
        request = Request(prompt=prompt, params=params, plan=None, stream=None, stats=stats)  # type: ignore[arg-type]
        self.requests.append(request)
        return Generation(request, self, self._cancel)

    @staticmethod
    def _cancel(request: Request) -> None:
        request.cancelled = True
        if not request.ended:
            request.emit(None, "cancelled")

    def next_request(self) -> Request:
        """The next submitted request, once it is there."""
        wait_for(lambda: self.requests)
        return self.requests.pop(0)


def wait_for(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.005)


def say(request: Request, *texts: str, finish: str | None = "stop") -> None:
    """Commit one token per text, then end."""
    for i, text in enumerate(texts):
        request.stats.num_generated_tokens += 1
        request.emit(Chunk(text, (i,), (TokenLogprobs(5, -0.5, ((5, -0.5), (6, float("-inf")))),)))
    if finish:
        request.stats.count_step(3, 2)
        request.emit(None, finish)


class Running:
    """A server in a thread of its own."""

    def __init__(self, runtime: StubRuntime, drain_seconds: float = 5.0, **options: Any) -> None:
        self.runtime = runtime
        self.service = Service(runtime, ServiceOptions(model_name="tiny", **options))  # type: ignore[arg-type]
        self._bound = listen("127.0.0.1", 0)
        self.port = self._bound.getsockname()[1]
        self._server = Server(self.service, drain_seconds=drain_seconds)
        self._thread = threading.Thread(target=lambda: self._server.run(sockets=[self._bound]))
        self._thread.start()
        wait_for(lambda: self._server.started)
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=PATIENCE_S)

    def post(self, path: str = "/v1/chat/completions", body: Any = None, **more: Any) -> httpx.Response:
        return self.client.post(path, json=CHAT if body is None else body, **more)

    def later(self, **fields: Any) -> tuple[threading.Thread, list[httpx.Response]]:
        """Post from another thread: its thread, and where the answer will be."""
        answers: list[httpx.Response] = []
        thread = threading.Thread(target=lambda: answers.append(self.post(body={**CHAT, **fields})))
        thread.start()
        return thread, answers

    def outcome(self, name: str, route: str = "chat") -> float:
        value = self.service.metrics.registry.get_sample_value(
            "xpress_requests_total", {"route": route, "outcome": name}
        )
        assert value is not None
        return value

    def stop(self) -> None:
        self._server.should_exit = True

    def close(self) -> None:
        self.client.close()
        self.service.cancel_all()
        self.stop()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()


@pytest.fixture(scope="module")
def codec(tiny_bundle: Path) -> TextCodec:
    return TextCodec.open(tiny_bundle / "tokenizer")


@pytest.fixture
def start(codec: TextCodec) -> Iterator[Callable[..., Running]]:
    """Starts servers, each over a stub of its own."""
    with contextlib.ExitStack() as stack:

        def run(**options: Any) -> Running:
            return stack.enter_context(contextlib.closing(Running(StubRuntime(codec), **options)))

        yield run


@pytest.fixture
def server(start: Callable[..., Running]) -> Running:
    return start()


def error_of(answer: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return error


def events(text: str) -> list[Any]:
    parts = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    return [part if part == "[DONE]" or part.startswith(":") else json.loads(part) for part in parts]


# Answers


def test_a_whole_answer(server: Running) -> None:
    thread, answers = server.later(logprobs=True, top_logprobs=2)
    say(server.runtime.next_request(), "he", "llo")
    thread.join()
    body = answers[0].json()
    assert body["object"] == "chat.completion" and body["model"] == "tiny"
    assert re.fullmatch("chatcmpl-[0-9a-f]{24}", body["id"])
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "hello", "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert len(choice["logprobs"]["content"]) == 2
    assert [entry["logprob"] for entry in choice["logprobs"]["content"][0]["top_logprobs"]] == [-0.5, -9999.0]
    assert body["usage"]["total_tokens"] == 3 + 2
    extra = body["usage"]["xpress"]
    assert (extra["tau"], extra["num_draft_tokens"], extra["num_accepted"], extra["mode"]) == (3.0, 3, 2, "target")


def test_a_stream_arrives_as_it_is_made(server: Running) -> None:
    body = {**CHAT, "stream": True, "stream_options": {"include_usage": True}}
    with server.client.stream("POST", "/v1/chat/completions", json=body) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = (line for line in answer.iter_lines() if line)
        request = server.runtime.next_request()
        opening = json.loads(next(lines).removeprefix("data: "))
        assert opening["choices"][0]["delta"] == {"role": "assistant", "content": ""}
        say(request, "one", finish=None)
        first = json.loads(next(lines).removeprefix("data: "))
        assert first["choices"][0]["delta"] == {"content": "one"} and first["usage"] is None
        say(request, "", "two", finish="length")
        rest = [line.removeprefix("data: ") for line in lines]
    assert rest[-1] == "[DONE]"
    second, last, with_usage = map(json.loads, rest[:-1])
    assert second["choices"][0]["delta"] == {"content": "two"}
    assert (last["choices"][0]["delta"], last["choices"][0]["finish_reason"]) == ({}, "length")
    assert with_usage["choices"] == [] and with_usage["usage"]["completion_tokens"] == 3
    assert {part["id"] for part in (opening, first, second, last, with_usage)} == {opening["id"]}


def test_completions_say_where_each_token_begins(server: Running) -> None:
    thread = threading.Thread(target=lambda: say(server.runtime.next_request(), "a", "b"))
    thread.start()
    body = {"prompt": "hi", "logprobs": 1, "stream": True}
    sent = events(server.post("/v1/completions", body).text)
    thread.join()
    assert sent.pop() == "[DONE]"
    assert "".join(part["choices"][0]["text"] for part in sent) == "ab"
    spelled = server.runtime.codec.decode([5])
    shown = [part["choices"][0]["logprobs"] for part in sent[:2]]
    assert [one["text_offset"] for one in shown] == [[0], [len(spelled)]]
    assert shown[0]["tokens"] == [spelled] and shown[0]["token_logprobs"] == [-0.5]
    assert shown[0]["top_logprobs"][0][spelled] == -0.5


def test_a_waiting_stream_is_kept_alive(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_exchange, "KEEP_ALIVE_S", 0.02)
    with server.client.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as answer:
        request = server.runtime.next_request()
        lines = answer.iter_lines()
        assert sum(next(lines) == ": waiting" for _ in range(8)) >= 2
        say(request, "x")
        assert [line for line in lines if line][-1] == "data: [DONE]"


# Clients that leave


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_cancels_its_request(server: Running, stream: bool) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)
    connection.request("POST", "/v1/chat/completions", json.dumps({**CHAT, "stream": stream}))
    request = server.runtime.next_request()
    if stream:
        say(request, "one", finish=None)
        assert connection.getresponse().readline().startswith(b"data: ")
    assert not request.cancelled
    connection.sock.close() if connection.sock else connection.close()
    del connection
    wait_for(lambda: request.cancelled)
    wait_for(lambda: server.outcome("cancelled") == 1)
    assert server.outcome("stop") == 0
    assert not server.service._running


# Refusals


def test_a_full_queue_is_429_with_a_time_to_come_back(server: Running) -> None:
    server.runtime.refuse = QueueFullError("2 requests are waiting")
    answer = server.post()
    assert answer.status_code == 429
    assert 1 <= int(answer.headers["retry-after"]) <= 60
    assert error_of(answer)["code"] == "queue_full" and "2 requests" in error_of(answer)["message"]
    assert server.outcome("queue_full") == 1


@pytest.mark.parametrize(
    ("refusal", "status", "param", "outcome"),
    [
        (RequestError("max_new_tokens is 900, too many", "max_new_tokens"), 400, "max_tokens", "refused"),
        (RequestError("the prompt is empty"), 400, "messages", "refused"),
        (RequestError("messages[0].role is 'x'"), 400, "messages[0].role", "refused"),
        (ClosedError("the runtime is closed"), 503, None, "unavailable"),
        (EngineError("target: out of memory"), 500, None, "error"),
        (ValueError("a defect"), 500, None, "error"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_refusals_of_the_runtime(
    server: Running, refusal: Exception, status: int, param: str | None, outcome: str
) -> None:
    server.runtime.refuse = refusal
    answer = server.post()
    assert (answer.status_code, error_of(answer)["param"]) == (status, param)
    assert ("defect" in answer.text) is False
    assert server.outcome(outcome) == 1
    server.runtime.refuse = None
    thread, answers = server.later()
    say(server.runtime.next_request(), "fine")
    thread.join()
    assert answers[0].json()["choices"][0]["message"]["content"] == "fine"


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_fails_half_way_is_said(server: Running, stream: bool) -> None:
    thread, answers = server.later(stream=stream)
    request = server.runtime.next_request()
    say(request, "half", finish=None)
    request.emit(None, error=EngineError("target: broken"))
    thread.join()
    if stream:
        sent = events(answers[0].text)
        assert sent[-1]["error"]["message"] == "target: broken"
        assert "[DONE]" not in sent
    else:
        assert answers[0].status_code == 500
        assert error_of(answers[0])["type"] == "server_error"
    assert server.outcome("error") == 1


def test_a_limit_for_chats_that_set_none(start: Callable[..., Running]) -> None:
    server = start(default_max_tokens=30)
    for fields, expected in (({}, 30), ({"max_tokens": 40}, 40)):
        thread, _ = server.later(**fields)
        request = server.runtime.next_request()
        assert request.params.max_new_tokens == expected
        say(request, "x")
        thread.join()
    server.runtime.max_context = len(request.prompt) + 7
    thread, _ = server.later()
    request = server.runtime.next_request()
    assert request.params.max_new_tokens == 7
    say(request, "x")
    thread.join()


def test_the_field_is_named_over_http(server: Running) -> None:
    answer = server.post(body={**CHAT, "temperature": -1})
    assert answer.status_code == 400
    assert error_of(answer) == {
        "message": "temperature must be between 0 and 100, got -1.0",
        "type": "invalid_request_error",
        "param": "temperature",
        "code": None,
    }
    assert server.client.post("/v1/chat/completions", content=b"\xff").status_code == 400
    assert server.outcome("refused") == 2


def test_paths_methods_and_models_that_do_not_exist(server: Running) -> None:
    for answer, status in (
        (server.client.get("/v1/nothing"), 404),
        (server.client.get("/v1/chat/completions"), 405),
        (server.client.get("/v1/models/other"), 404),
        (server.post(body={**CHAT, "model": "other"}), 404),
    ):
        assert answer.status_code == status
        assert error_of(answer)["type"] == "invalid_request_error"
    assert error_of(server.post(body={**CHAT, "model": "other"}))["code"] == "model_not_found"
    assert server.client.get("/v1/models").json()["data"][0]["id"] == "tiny"
    assert server.client.get("/v1/models/tiny").json()["xpress"] == {"max_context": 64, "modes": ["target"]}


def test_bodies_that_are_too_large_or_too_slow(start: Callable[..., Running]) -> None:
    server = start(max_body_bytes=1000, body_timeout_s=0.1)
    answer = server.post(body={**CHAT, "user": "x" * 1000})
    assert (answer.status_code, "larger than 1000 bytes" in error_of(answer)["message"]) == (413, True)
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)
    connection.putrequest("POST", "/v1/chat/completions")
    connection.putheader("Content-Length", "100")
    connection.endheaders()
    connection.send(b"{")
    assert connection.getresponse().status == 408
    connection.close()
    assert server.outcome("refused") == 2


def test_keys(start: Callable[..., Running]) -> None:
    server = start(api_keys=("first", "sécond"))
    for header in (None, "Bearer wrong", "Basic first", "Bearer", "Bearer firs", "Bearer first2", "first"):
        headers = {"Authorization": header} if header else {}
        for answer in (server.post(headers=headers), server.client.get("/v1/models", headers=headers)):
            assert (answer.status_code, error_of(answer)["code"]) == (401, "invalid_api_key")
            assert answer.headers["www-authenticate"] == "Bearer"
    for key in ("first", "sécond"):
        headers = {"Authorization": f"Bearer {key}".encode()}
        assert server.client.get("/v1/models", headers=headers).status_code == 200
    for path in ("/health", "/ready", "/metrics"):
        assert server.client.get(path).status_code == 200
    assert server.outcome("unauthorized") == 7


# The end


def test_draining_finishes_what_runs_and_refuses_the_rest(server: Running) -> None:
    thread, answers = server.later()
    request = server.runtime.next_request()
    server.service.draining = True
    assert server.client.get("/ready").status_code == 503
    assert server.client.get("/health").status_code == 200
    refused = server.post()
    assert refused.status_code == 503 and "retry-after" in refused.headers
    server.stop()
    say(request, "done")
    thread.join()
    assert answers[0].json()["choices"][0]["message"]["content"] == "done"
    with pytest.raises(httpx.TransportError):
        wait_for(lambda: httpx.get(f"http://127.0.0.1:{server.port}/health") is None)


@pytest.mark.parametrize("stream", [False, True])
def test_what_outlasts_the_drain_is_cancelled_and_told(start: Callable[..., Running], stream: bool) -> None:
    server = start(drain_seconds=0.1)
    thread, answers = server.later(stream=stream)
    request = server.runtime.next_request()
    say(request, "half", finish=None)
    server.stop()
    thread.join()
    assert request.cancelled
    error = events(answers[0].text)[-1]["error"] if stream else error_of(answers[0])
    assert error["code"] == "unavailable"
    assert server.outcome("unavailable") == 1


# Metrics


def test_metrics(start: Callable[..., Running]) -> None:
    server, other = start(), start()
    thread, _ = server.later()
    say(server.runtime.next_request(), "a", "b")
    thread.join()
    text = server.client.get("/metrics").text
    assert len({family.name for family in text_string_to_metric_families(text)}) >= 18
    for line in (
        'xpress_requests_total{outcome="stop",route="chat"} 1.0',
        'xpress_requests_total{outcome="error",route="completions"} 0.0',
        "xpress_requests_running 1.0",
        "xpress_requests_waiting 0.0",
        "xpress_generated_tokens_total 5.0",
        "xpress_kv_bytes 4096.0",
        'xpress_stage_seconds_total{stage="verify"} 0.0',
        'xpress_tau_bucket{le="3.0"} 1.0',
        "xpress_tau_sum 3.0",
        "xpress_cycle_seconds_count 1.0",
        "xpress_time_to_first_token_seconds_sum 0.002",
    ):
        assert line in text.splitlines(), line
    assert 'outcome="stop",route="chat"} 0.0' in other.client.get("/metrics").text


# The process


def test_addresses_that_cannot_be_had() -> None:
    from xpress_export.errors import XpressExportError

    with listen("127.0.0.1", 0) as taken:
        taken.listen()
        with pytest.raises(XpressExportError, match=r"port \d+: Address already in use; choose another --port"):
            listen("127.0.0.1", taken.getsockname()[1])
    with pytest.raises(XpressExportError, match=r"cannot listen on 256\.0\.0\.1"):
        listen("256.0.0.1", 80)


def test_options_are_checked() -> None:
    for options in ({"model_name": ""}, {"model_name": "m", "api_keys": ("",)}):
        with pytest.raises(RequestError):
            ServiceOptions(**options)  # type: ignore[arg-type]


def test_an_application_can_be_mounted(codec: TextCodec) -> None:
    from fastapi import FastAPI

    from xpress_export.runtime.server import make_app

    async def ask() -> httpx.Response:
        runtime: Any = StubRuntime(codec)
        outer = FastAPI()
        outer.mount("/llm", make_app(Service(runtime, ServiceOptions(model_name="tiny"))))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(outer), base_url="http://test") as client:
            return await client.get("/llm/v1/models")

    assert asyncio.run(ask()).json()["data"][0]["id"] == "tiny"
