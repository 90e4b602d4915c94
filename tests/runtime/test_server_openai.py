"""The server over a real bundle, as OpenAI's own client sees it, and as a process that is told to end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from xpress_export.runtime import Runtime, SamplingParams
from xpress_export.runtime.server_run import Server, listen
from xpress_export.runtime.server_service import Service, ServiceOptions

KEY = "sk-test"
HELLO: Any = [{"role": "user", "content": "hello there"}]
MODES = ("target", "dflash", "xpress", None)


@pytest.fixture(scope="module")
def runtime(tiny_bundle: Path) -> Iterator[Runtime]:
    with Runtime.open(tiny_bundle, num_threads=1, max_queue=32) as opened:
        yield opened


@pytest.fixture(scope="module")
def url(runtime: Runtime) -> Iterator[str]:
    service = Service(runtime, ServiceOptions(model_name="tiny", api_keys=(KEY,)))
    bound = listen("127.0.0.1", 0)
    server = Server(service, drain_seconds=1)
    thread = threading.Thread(target=lambda: server.run(sockets=[bound]))
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{bound.getsockname()[1]}/v1"
    server.should_exit = True
    thread.join()


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url, api_key=KEY, max_retries=0) as made:
        yield made


def extra(usage: Any) -> dict[str, Any]:
    """The draft statistics of an answer's usage."""
    found: dict[str, Any] = usage.model_extra["xpress"]
    return found


@pytest.mark.parametrize("mode", MODES)
def test_chat_says_what_the_library_says(client: openai.OpenAI, runtime: Runtime, mode: str | None) -> None:
    options: dict[str, Any] = dict(mode=mode, ignore_eos=True, repetition_penalty=1.1)
    expected = runtime.submit(
        HELLO, SamplingParams(max_new_tokens=24, seed=3, temperature=0.8, top_p=0.9, **options)
    ).result()
    asked: Any = dict(model="tiny", messages=HELLO, max_tokens=24, seed=3, temperature=0.8, top_p=0.9)
    whole = client.chat.completions.create(**asked, extra_body=options)
    assert whole.choices[0].message.content == expected.text
    assert whole.choices[0].finish_reason == "length"
    assert whole.usage is not None and whole.usage.completion_tokens == len(expected.token_ids)
    stats = extra(whole.usage)
    assert (stats["mode"], stats["seed"]) == (mode or "adaptive", 3)
    assert (stats["num_draft_tokens"] > 0) == (mode in ("dflash", "xpress")) or mode is None
    with client.chat.completions.create(
        **asked, extra_body=options, stream=True, stream_options={"include_usage": True}
    ) as stream:
        parts = list(stream)
    assert "".join(part.choices[0].delta.content or "" for part in parts if part.choices) == expected.text
    assert parts[-1].usage is not None and parts[-1].usage.completion_tokens == 24
    assert extra(parts[-1].usage)["tau"] >= 1


def test_temperature_is_openais_and_zero_is_greedy(client: openai.OpenAI, runtime: Runtime) -> None:
    greedy = runtime.submit(HELLO, SamplingParams(max_new_tokens=16)).result().text
    answers = {
        client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=16).choices[0].message.content
        for _ in range(3)
    }
    assert len(answers) > 1
    zero = client.chat.completions.create(model="tiny", messages=HELLO, max_completion_tokens=16, temperature=0)
    assert zero.choices[0].message.content == greedy


def test_stop_strings(client: openai.OpenAI, runtime: Runtime) -> None:
    text = runtime.submit(HELLO, SamplingParams(max_new_tokens=24, ignore_eos=True)).result().text
    stop = text[6:8]
    answer = client.chat.completions.create(
        model="tiny", messages=HELLO, max_tokens=24, temperature=0, stop=stop, extra_body={"ignore_eos": True}
    )
    assert answer.choices[0].message.content == text[: text.index(stop)]
    assert answer.choices[0].finish_reason == "stop"


def test_completions_with_logprobs(client: openai.OpenAI, runtime: Runtime) -> None:
    ids = runtime.codec.encode("the target")
    expected = runtime.submit(ids, SamplingParams(max_new_tokens=16, logprobs=2)).result()
    for prompt in ("the target", ids):
        whole = client.completions.create(model="tiny", prompt=prompt, temperature=0, logprobs=2)
        assert whole.choices[0].text == expected.text
        found = whole.choices[0].logprobs
        assert found is not None and found.token_logprobs == pytest.approx(
            [one.logprob for one in expected.logprobs], abs=1e-4
        )
        assert found.text_offset is not None and found.text_offset[0] == 0
    stream = client.completions.create(model="tiny", prompt="the target", temperature=0, stream=True)
    assert "".join(part.choices[0].text for part in stream) == expected.text


def test_chat_logprobs(client: openai.OpenAI, runtime: Runtime) -> None:
    asked: Any = dict(model="tiny", messages=HELLO, max_tokens=12, temperature=0, logprobs=True, top_logprobs=3)
    expected = runtime.submit(HELLO, SamplingParams(max_new_tokens=12, logprobs=3)).result()
    whole = client.chat.completions.create(**asked).choices[0]
    assert whole.logprobs is not None and whole.logprobs.content is not None
    assert [entry.logprob for entry in whole.logprobs.content] == pytest.approx(
        [one.logprob for one in expected.logprobs], abs=1e-4
    )
    assert all(len(entry.top_logprobs) == 3 for entry in whole.logprobs.content)
    joined = b"".join(bytes(entry.bytes or ()) for entry in whole.logprobs.content)
    assert joined.decode("utf-8", "replace") == whole.message.content
    streamed = [
        entry
        for part in client.chat.completions.create(**asked, stream=True)
        if (logprobs := part.choices[0].logprobs) is not None
        for entry in logprobs.content or ()
    ]
    assert [entry.token for entry in streamed] == [entry.token for entry in whole.logprobs.content]
    assert [entry.bytes for entry in streamed] == [entry.bytes for entry in whole.logprobs.content]


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "pirate", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": "x " * 5000}]}, "messages"),
        ({"max_tokens": 10_000}, "max_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"n": 3}, "n"),
        ({"stop": [f"s{i}" for i in range(500)]}, "stop"),
        ({"extra_body": {"beam_width": 4}}, "beam_width"),
        ({"extra_body": {"mode": "warp"}}, "mode"),
        ({"extra_body": {"refine_passes": 999, "mode": "xpress"}}, "refine_passes"),
        ({"logit_bias": {"999999": 1}}, "logit_bias"),
    ],
)
def test_bad_requests_name_their_field_and_harm_nobody(
    client: openai.OpenAI, fields: dict[str, Any], param: str
) -> None:
    asked: dict[str, Any] = {"model": "tiny", "messages": HELLO, "max_tokens": 4, **fields}
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(**asked)
    assert refused.value.param == param, refused.value
    assert client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=4).choices[0].message


def test_an_empty_completion_prompt_and_ids_that_do_not_exist(client: openai.OpenAI) -> None:
    for prompt in ("", [999_999], [-1]):
        with pytest.raises(openai.BadRequestError) as refused:
            client.completions.create(model="tiny", prompt=prompt)
        assert refused.value.param == "prompt"


def test_a_wrong_key(url: str) -> None:
    with openai.OpenAI(base_url=url, api_key="wrong", max_retries=0) as stranger:
        with pytest.raises(openai.AuthenticationError):
            stranger.models.list()
        with pytest.raises(openai.AuthenticationError):
            stranger.chat.completions.create(model="tiny", messages=HELLO)


def test_many_at_a_time_say_what_each_says_alone(url: str, runtime: Runtime) -> None:
    """Mixed lengths, modes, seeds and temperatures; a third of the clients leave half way."""
    jobs = [
        dict(
            prompt=f"{'the drafter ' * (i % 5)}{i}",
            options=dict(max_new_tokens=6 + i % 23, seed=i, temperature=(i % 3) * 0.5, ignore_eos=True),
            mode=MODES[i % 4],
        )
        for i in range(24)
    ]

    async def ask(made: openai.AsyncOpenAI, i: int, job: dict[str, Any]) -> str | None:
        options = dict(job["options"])
        most, ignore_eos = options.pop("max_new_tokens"), options.pop("ignore_eos")
        stream = await made.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": job["prompt"]}],
            max_tokens=most,
            stream=True,
            extra_body={"mode": job["mode"], "ignore_eos": ignore_eos},
            **options,
        )
        text = ""
        async with stream:
            async for part in stream:
                text += part.choices[0].delta.content or ""
                if i % 3 == 2 and len(text) > 3:
                    return None
        return text

    async def ask_all() -> list[str | None]:
        async with openai.AsyncOpenAI(base_url=url, api_key=KEY, max_retries=0) as made:
            return await asyncio.gather(*(ask(made, i, job) for i, job in enumerate(jobs)))

    got = asyncio.run(ask_all())
    compared = 0
    for job, text in zip(jobs, got, strict=True):
        if text is not None:
            alone = runtime.submit(job["prompt"], SamplingParams(mode=job["mode"], **job["options"])).result()
            assert text == alone.text, job
            compared += 1
    assert compared >= 16
    deadline = time.monotonic() + 5
    while runtime.stats.num_running and time.monotonic() < deadline:
        time.sleep(0.02)
    assert (runtime.stats.num_running, runtime.stats.num_waiting) == (0, 0)


# A process of its own


@contextlib.contextmanager
def process(bundle: Path, *options: str, **environment: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`serve` on a free port, once it takes requests; its address."""
    command = [sys.executable, "-m", "xpress_export", "serve", str(bundle), "--port", "0", "--threads", "1", *options]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment}
    ) as started:
        try:
            assert started.stderr is not None
            found = None
            while found is None:
                line = started.stderr.readline()
                assert line, "the server ended before it served"
                found = re.search(r"at (http://\S+)/v1", line)
            yield started, found[1]
        finally:
            started.kill()


def test_sigterm_ends_in_order(tiny_bundle: Path) -> None:
    environment = {"XPRESS_EXPORT_API_KEY": f"other {KEY}"}
    with process(tiny_bundle, "--served-model-name", "mine", **environment) as (server, address):
        headers = {"Authorization": f"Bearer {KEY}"}
        body = {"messages": HELLO, "max_tokens": 400, "temperature": 0, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{address}/v1/chat/completions", json=body, headers=headers, timeout=30) as answer:
            lines = (line for line in answer.iter_lines() if line)
            assert json.loads(next(lines).removeprefix("data: "))["model"] == "mine"
            server.send_signal(signal.SIGTERM)
            assert list(lines)[-1] == "data: [DONE]"
        assert server.wait(10) == 0
        assert server.stdout is not None and server.stderr is not None
        assert (server.stdout.read(), server.stderr.read()) == ("", "every request has ended; stopped\n")


def test_a_second_ctrl_c_cancels(tiny_bundle: Path) -> None:
    body = {"messages": HELLO, "max_tokens": 550, "ignore_eos": True, "stream": True}
    with process(tiny_bundle) as (server, address):
        with httpx.stream("POST", f"{address}/v1/chat/completions", json=body, timeout=30) as answer:
            lines = (line for line in answer.iter_lines() if line)
            next(lines)
            server.send_signal(signal.SIGINT)
            time.sleep(0.2)
            server.send_signal(signal.SIGINT)
            last = list(lines)[-1]
        assert last == "data: [DONE]" or json.loads(last.removeprefix("data: "))["error"]["code"] == "unavailable"
        assert server.wait(10) == 0


@pytest.mark.parametrize(
    ("bundle", "options", "message"),
    [
        ("{folder}/absent", [], "does not exist; give the folder of a bundle"),
        ("{bundle}", ["--port", "{taken}"], "cannot listen on 127.0.0.1, port {taken}: Address already in use"),
        ("{bundle}", ["--host", "256.0.0.1"], "cannot listen on 256.0.0.1"),
    ],
)
def test_what_cannot_start_says_why_in_one_sentence(
    tiny_bundle: Path, tmp_path: Path, bundle: str, options: list[str], message: str
) -> None:
    with listen("127.0.0.1", 0) as taken:
        taken.listen()
        words = {"folder": tmp_path, "bundle": tiny_bundle, "taken": taken.getsockname()[1]}
        command = [sys.executable, "-m", "xpress_export", "serve", *(w.format(**words) for w in (bundle, *options))]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert message.format(**words) in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("package", ["fastapi", "uvicorn", "prometheus_client"])
def test_a_missing_package_is_named_with_its_extra(package: str, tiny_bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "class Block:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.partition('.')[0] == {package!r}:\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Block())\n"
    )
    command = [sys.executable, "-m", "xpress_export", "serve", str(tiny_bundle)]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert (done.returncode, done.stdout) == (1, "")
    assert f"{package.replace('_', '-')} is needed to serve bundles over HTTP" in done.stderr
    assert "pip install 'xpress-export[serve]'" in done.stderr
