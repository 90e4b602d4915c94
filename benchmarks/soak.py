"""Many clients against one `serve` process for a long time: nothing lost, nothing mixed up, nothing that grows.

    python benchmarks/soak.py bundles/smollm2-135m                                   2,000 requests from 64 clients
    python benchmarks/soak.py bundles/smollm2-135m --requests 200 --clients 16 --tokens 16

Requests differ in prompt, route, length, mode, seed, temperature and penalties, streamed or whole; some clients leave
before the answer, some in the middle of it. Each different request is first answered alone, by a runtime with one slot
in this process; every finished answer of the server must be that one, text, finish reason and token count. A full
queue is part of it: the client comes back when the server said.

A batch and a single request are different matrix products, whose last bits may differ. So a different answer counts
as a near-tie, and is listed, only if noise of 5e-5 on the logits of the token where it parts makes the same sampler
choose another one; any other difference makes the command fail, and so does a request that failed or memory, threads
or files that grew from one half of the requests to the other (each followed by one request, at rest).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np

from xpress_export.runtime import Runtime, SamplingParams
from xpress_export.runtime.sampling import Uniforms, distribution

WORDS = ("river", "stone", "seven", "lamp", "paper", "garden", "fifteen", "blue", "engine", "count", "explain", "list")
MODES = (None, "target", "dflash", "xpress")
HTTP_ONLY = {"messages", "prompt", "max_tokens", "stream", "stream_options"}
ALLOWED_GROWTH, ALLOWED_BYTES = 0.02, 12e6  # memory has to exceed both: allocators settle within a few MB
NOISE, NUM_NOISES = 5e-5, 24
PATIENCE_S = 900.0


@dataclass(frozen=True)
class Job:
    """A request, and what its client does. leaves: "early", "late" or None: stays to the end."""

    number: int
    body: dict[str, Any]
    is_chat: bool
    leaves: str | None

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.is_chat else "/v1/completions"


@dataclass
class Answer:
    """What one request ended with."""

    text: str
    finish_reason: str
    num_tokens: int


class Sample(NamedTuple):
    """The server at a moment: seconds since the start, requests ended, memory in bytes, threads, open files."""

    seconds: float
    num_ended: int
    rss: int
    threads: int
    files: int


@dataclass
class Tally:
    """What happened. resting: after each half of the requests."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    different: list[tuple[Job, Answer]] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    resting: list[Sample] = field(default_factory=list)
    num_ended: int = 0


def make_jobs(num_requests: int, num_different: int, max_tokens: int, modes: tuple[str, ...], seed: int) -> list[Job]:
    """The requests in order of sending: `num_different` ones, each about as often."""
    rng = random.Random(seed)
    bodies = [_body(rng, max_tokens, [m for m in MODES if m is None or m in modes]) for _ in range(num_different)]
    jobs = []
    for i in range(num_requests):
        which = i % num_different
        body, is_chat = bodies[which]
        leaves = rng.choices((None, "early", "late"), (0.85, 0.05, 0.10))[0]
        stream = leaves == "late" or rng.random() < 0.5
        streaming = {"stream": True, "stream_options": {"include_usage": True}} if stream else {"stream": False}
        jobs.append(Job(which, {**body, **streaming}, is_chat, leaves))
    return jobs


def _body(rng: random.Random, max_tokens: int, modes: list[str | None]) -> tuple[dict[str, Any], bool]:
    text = " ".join(rng.choices(WORDS, k=rng.choice((2, 5, 12, 60))))
    is_chat = rng.random() < 0.7
    body: dict[str, Any] = {"messages": [{"role": "user", "content": text}]} if is_chat else {"prompt": text}
    body |= {
        "max_tokens": rng.randint(1, max_tokens),
        "temperature": rng.choice((0.0, 0.0, 0.7, 1.0)),
        "seed": rng.getrandbits(32),
        "ignore_eos": rng.random() < 0.3,
        "mode": rng.choice(modes),
    }
    if rng.random() < 0.25:
        body |= {"top_p": 0.9, "repetition_penalty": 1.1}
    if rng.random() < 0.1:
        body |= {"stop": ["the", "."]}
    return body, is_chat


def answers_alone(bundle: Path, jobs: list[Job]) -> dict[int, Answer]:
    """Every different request, one after the other."""
    found: dict[int, Answer] = {}
    with Runtime.open(bundle, num_slots=1) as runtime:
        for job in jobs:
            if job.number not in found:
                result = runtime.submit(prompt_of(runtime, job), params_of(job)).result()
                found[job.number] = Answer(result.text, result.finish_reason, len(result.token_ids))
                print(f"\ranswered alone: {len(found)}", end="", file=sys.stderr)
    print(file=sys.stderr)
    return found


def prompt_of(runtime: Runtime, job: Job) -> list[int]:
    if job.is_chat:
        return runtime.encode(job.body["messages"])
    return runtime.codec.encode(job.body["prompt"])


def params_of(job: Job) -> SamplingParams:
    options = {name: value for name, value in job.body.items() if name not in HTTP_ONLY}
    return SamplingParams(max_new_tokens=job.body["max_tokens"], **options)


def is_near_tie(runtime: Runtime, job: Job, got: Answer) -> bool:
    """Whether noise on the logits changes the choice of the token where `got` parts from the answer alone."""
    prompt, params = prompt_of(runtime, job), params_of(job)
    uniforms, noise = Uniforms(job.body["seed"], 0), np.random.default_rng(0)
    shaky = []

    def choice(logits: Any, position: int) -> int:
        if params.temperature == 0:
            return int(logits.argmax())
        return distribution(logits, params).draw(uniforms[position])

    def watch(text: Any, logits: Any) -> Any:
        position = len(text) - len(prompt)
        noisy = (logits + noise.normal(0, NOISE, logits.shape).astype(np.float32) for _ in range(NUM_NOISES))
        shaky.append(len({choice(row, position) for row in (logits, *noisy)}) > 1)
        return logits

    alone = runtime.submit(prompt, replace(params, mode="target", logits_processor=watch)).result()
    common = next((i for i, (a, b) in enumerate(zip(alone.text, got.text, strict=False)) if a != b), len(got.text))
    lengths = [len(runtime.codec.decode(alone.token_ids[: i + 1])) for i in range(len(alone.token_ids))]
    parts = next((i for i, length in enumerate(lengths) if length > common), len(lengths))
    return any(shaky[max(0, parts - 1) : parts + 1])  # a character may take two tokens


async def send(client: httpx.AsyncClient, job: Job, tally: Tally) -> Answer | None:
    """One request until it is answered or its client has left (None)."""
    while True:
        if job.leaves == "early":
            with contextlib.suppress(httpx.ReadTimeout):
                await client.post(job.path, json=job.body, timeout=httpx.Timeout(PATIENCE_S, read=0.05))
            return None
        async with client.stream("POST", job.path, json=job.body) as response:
            if response.status_code == 429:
                tally.counts["429"] += 1
                await asyncio.sleep(float(response.headers["retry-after"]))
                continue
            if response.status_code != 200:
                raise RuntimeError(f"{response.status_code}: {(await response.aread()).decode()}")
            if not job.body["stream"]:
                return _answer([json.loads(await response.aread())])
            return await _read_stream(response, job)


async def _read_stream(response: httpx.Response, job: Job) -> Answer | None:
    parts: list[dict[str, Any]] = []
    async for line in response.aiter_lines():
        if line == "data: [DONE]":
            return _answer(parts)
        if line.startswith("data: "):
            parts.append(json.loads(line.removeprefix("data: ")))
            if "error" in parts[-1]:
                raise RuntimeError(str(parts[-1]["error"]))
            if job.leaves == "late" and len(parts) > 3:
                return None
    raise RuntimeError("a stream ended without [DONE]")


def _answer(parts: list[dict[str, Any]]) -> Answer:
    choices = [choice for part in parts for choice in part["choices"]]
    texts = [c.get("text") or (c.get("delta") or c.get("message") or {}).get("content") or "" for c in choices]
    return Answer("".join(texts), choices[-1]["finish_reason"], parts[-1]["usage"]["completion_tokens"])


async def run_clients(url: str, jobs: list[Job], num_clients: int, expected: dict[int, Answer], tally: Tally) -> None:
    """All jobs, each client taking the next one as soon as it is free."""
    waiting = iter(jobs)
    limits = httpx.Limits(max_connections=num_clients, max_keepalive_connections=num_clients)

    async def work(client: httpx.AsyncClient) -> None:
        for job in waiting:
            try:
                _judge(await send(client, job, tally), expected[job.number], job, tally)
            except Exception as error:
                tally.counts["failed"] += 1
                tally.wrong.append(f"request {job.number} {job.body}: {type(error).__name__}: {error}")
            tally.num_ended += 1

    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, limits=limits) as client:
        await asyncio.gather(*(work(client) for _ in range(num_clients)))


def _judge(got: Answer | None, expected: Answer, job: Job, tally: Tally) -> None:
    if got is None:
        tally.counts["left"] += 1
        return
    same = got == expected
    tally.counts["same" if same else "different"] += 1
    if not same:
        tally.different.append((job, got))


def sample(pid: int, started: float, num_ended: int) -> Sample:
    status = Path(f"/proc/{pid}/status").read_text()
    rss, threads = (int(re.search(rf"^{name}:\s+(\d+)", status, re.M)[1]) for name in ("VmRSS", "Threads"))  # type: ignore[index]
    files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    return Sample(time.monotonic() - started, num_ended, rss * 1024, threads, files)


async def watch(pid: int, tally: Tally, ended: asyncio.Event) -> None:
    """Sample the server twice a second."""
    started = time.monotonic()
    while not ended.is_set():
        now = sample(pid, started, tally.num_ended)
        tally.samples.append(now)
        print(f"\r{now.num_ended} ended, {now.rss >> 20} MB, {now.threads} threads ", end="", file=sys.stderr)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(ended.wait(), 0.5)
    print(file=sys.stderr)


async def soak(url: str, pid: int, jobs: list[Job], num_clients: int, expected: dict[int, Answer]) -> Tally:
    """Both halves of the requests, each until the server rests."""
    tally, ended = Tally(), asyncio.Event()
    watcher = asyncio.create_task(watch(pid, tally, ended))
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:
        for half in (jobs[: len(jobs) // 2], jobs[len(jobs) // 2 :]):
            await run_clients(url, half, num_clients, expected, tally)
            await client.post("/v1/completions", json={"prompt": "rest", "max_tokens": 2})
            await asyncio.sleep(1)
            tally.resting.append(sample(pid, 0.0, tally.num_ended))
        ended.set()
        await watcher
        metrics = (await client.get("/metrics")).text
    for name in ("running", "waiting"):
        left = float(re.search(rf"^xpress_requests_{name} (\S+)", metrics, re.M)[1])  # type: ignore[index]
        if left:
            tally.wrong.append(f"{left:.0f} requests are still {name} after every client is done")
    for line in re.findall(r"^xpress_requests_total.* [1-9].*", metrics, re.M):
        print(line)
    return tally


def growth(tally: Tally) -> dict[str, Any]:
    """Memory, threads and open files at rest after each half, and how much memory the second half added."""
    first, second = tally.resting
    return {
        "rss_mb": [round(first.rss / 1e6, 1), round(second.rss / 1e6, 1)],
        "threads": [first.threads, second.threads],
        "open_files": [first.files, second.files],
        "rss_growth": round(second.rss / first.rss - 1, 4),
        "rss_peak_mb": round(max(s.rss for s in tally.samples) / 1e6, 1),
        "most_threads": max(s.threads for s in tally.samples),
    }


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def start_server(bundle: Path, slots: int, max_queue: int) -> tuple[subprocess.Popen[str], str]:
    command = [sys.executable, "-m", "xpress_export", "serve", str(bundle), "--port", "0"]
    command += ["--slots", str(slots), "--max-queue", str(max_queue)]
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    for line in server.stderr:
        if found := re.search(r"at (http://\S+)/v1", line):
            return server, found[1]
        print(line, end="", file=sys.stderr)
    raise SystemExit("the server did not start")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--different", type=int, default=200, help="different requests among them")
    parser.add_argument("--tokens", type=int, default=48, help="most new tokens of a request")
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--max-queue", type=int, default=48, help="with 64 clients, some meet a full queue")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="also print one JSON object")
    asked = parser.parse_args()

    with Runtime.open(asked.bundle) as runtime:
        modes = runtime.modes
    jobs = make_jobs(asked.requests, min(asked.different, asked.requests), asked.tokens, modes, asked.seed)
    started = time.monotonic()
    expected = answers_alone(asked.bundle, jobs)
    print(f"{len(expected)} different requests answered alone in {time.monotonic() - started:.0f} s")
    server, url = start_server(asked.bundle, asked.slots, asked.max_queue)
    started = time.monotonic()
    try:
        tally = asyncio.run(soak(url, server.pid, jobs, asked.clients, expected))
        took, cpu_s = time.monotonic() - started, cpu_seconds(server.pid)
        server.send_signal(signal.SIGTERM)
        code = server.wait(60)
    finally:
        server.kill()
    listed = explain(asked.bundle, tally, expected)
    found = growth(tally)
    print(
        f"{asked.requests} requests from {asked.clients} clients in {took:.0f} s ({cpu_s:.0f} s of CPU in the server): "
        f"{dict(tally.counts)}"
    )
    print(f"at rest after each half: {found}; the server ended with code {code}")
    for line in [*listed, *tally.wrong[:20]]:
        print(line)
    added = tally.resting[1].rss - tally.resting[0].rss
    grew = (found["rss_growth"] > ALLOWED_GROWTH and added > ALLOWED_BYTES) or any(
        b > a for a, b in (found["threads"], found["open_files"])
    )
    ok = not tally.wrong and not grew and code == 0
    if asked.json:
        options = {**vars(asked), "bundle": asked.bundle.name}
        print(json.dumps({"asked": options, "seconds": took, "counts": tally.counts, **found}))
    print("nothing was lost, mixed up or grew" if ok else "FAILED")
    return 0 if ok else 1


def explain(bundle: Path, tally: Tally, expected: dict[int, Answer]) -> list[str]:
    """The near-ties among different answers; all others are added to what is wrong."""
    if not tally.different:
        return []
    listed = {}
    with Runtime.open(bundle, num_slots=1) as runtime:
        for job, got in tally.different:
            what = f"request {job.number} {job.body}\n  alone:  {expected[job.number]}\n  server: {got}"
            if what not in listed:
                listed[what] = is_near_tie(runtime, job, got)
            tally.counts["near_tie"] += listed[what]
    tally.wrong += [what for what, near in listed.items() if not near]
    return [f"near-tie: {what}" for what, near in listed.items() if near]


if __name__ == "__main__":
    sys.exit(main())
