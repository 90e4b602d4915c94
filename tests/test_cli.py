"""The command line as a user meets it: through its entry point, by its exit code, its output and its messages.

run     a process of its own, for what only a process can show: pipes, signals, streams, imports
call    the entry function in this process, for the rest: torch is loaded here already
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from xpress_export import cli, cli_generate, doctor
from xpress_export.gpu import Gpu
from xpress_export.manifest import open_bundle, read_manifest, write_manifest

PROGRAM = [sys.executable, "-m", "xpress_export"]
COMMANDS = [
    "build",
    "export",
    "generate",
    "inspect",
    "doctor",
    "eval",
    "bench",
    "serve",
    "train",
    "calibrate",
    "quantize",
    "check",
    "compile",
    "platforms",
    "cache",
    "graph",
]
INTERRUPTED = (130, -signal.SIGINT)
"""The second where the interrupt came in Python code that C code had called; a shell shows 130 for both."""
ESCAPE = "\x1b"
STATS = {
    *("num_verify_steps", "num_draft_tokens", "num_accepted", "tau", "acceptance_histogram"),
    *("prefill_ms", "decode_ms", "tokens_per_s"),
}
ENVIRONMENT = {k: v for k, v in os.environ.items() if k not in {"NO_COLOR", "FORCE_COLOR", "COLUMNS", "TERM"}}


@dataclass
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def message(self) -> str:
        """Standard error with its line breaks taken out."""
        return " ".join(self.err.split())


def run(*args: str | Path, stdin: bytes = b"", **environment: str) -> Done:
    """Run the command line in a process of its own, connected to pipes."""
    done = subprocess.run(
        [*PROGRAM, *map(str, args)], input=stdin, capture_output=True, env={**ENVIRONMENT, **environment}, check=False
    )
    return Done(done.returncode, done.stdout.decode(), done.stderr.decode())


def start(*args: str | Path) -> subprocess.Popen[bytes]:
    """As `run`, without waiting for the end."""
    command = [*PROGRAM, *map(str, args)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT)


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Callable[..., Done]]:
    """Call the entry function in this process."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGALRM)}
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)

    def entry(*args: str | Path) -> Done:
        monkeypatch.setattr(sys, "argv", ["xpress-export", *map(str, args)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capfd.readouterr()
        return Done(ended.value.code, out, err)  # type: ignore[arg-type]

    yield entry
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def quick_build(trace_once: Any, tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Builds of the tiny trio in this process reuse what `tiny_bundle` traced."""
    trace_once.install(monkeypatch)


# Help, versions, completion


@pytest.mark.parametrize("command", [[], *([name] for name in COMMANDS)], ids=["program", *COMMANDS])
def test_help(command: list[str], call: Callable[..., Done]) -> None:
    for flag in ("--help", "-h"):
        done = call(*command, flag)
        assert (done.code, done.err) == (0, "")
        assert done.out.startswith(f"Usage: xpress-export {' '.join(command)}".rstrip())
        assert max(map(len, done.out.splitlines())) <= 100
    assert "-v, --verbose" in done.out


def test_overview_lists_every_command_with_a_whole_sentence(call: Callable[..., Done]) -> None:
    listed = dict(re.findall(r"^  (\w+)  +(\S.*)$", call("--help").out.partition("Commands:")[2], re.MULTILINE))
    assert listed.keys() >= set(COMMANDS)
    assert [line for line in listed.values() if line.endswith("...")] == []


def test_no_command_shows_the_help_as_a_usage_error() -> None:
    done = run()
    assert (done.code, done.out) == (2, "")
    assert "First steps" in done.err and "Commands:" in done.err


def test_version_of_module_and_console_script() -> None:
    script = Path(sys.executable).with_name("xpress-export")
    as_script = subprocess.run([script, "--version"], capture_output=True, text=True, check=True)
    assert re.fullmatch(r"xpress-export, version \d+\.\d+\.\d+\n", as_script.stdout)
    assert run("--version").out == as_script.stdout


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_script(shell: str) -> None:
    done = run(_XPRESS_EXPORT_COMPLETE=f"{shell}_source")
    assert (done.code, done.err) == (0, "")
    assert "xpress-export" in done.out and f"{shell}_complete" in done.out


def test_bash_completes_commands_options_and_choices() -> None:
    if shutil.which("bash") is None:
        pytest.skip("there is no bash on this machine")
    script = """
        eval "$(_XPRESS_EXPORT_COMPLETE=bash_source xpress-export)"
        complete_words() {
            COMPREPLY=(); COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
            _xpress_export_completion xpress-export
        }
        complete_words xpress-export ge; echo "${COMPREPLY[@]}"
        complete_words xpress-export generate b --mo; echo "${COMPREPLY[@]}"
        complete_words xpress-export generate b --mode x; echo "${COMPREPLY[@]}"
    """
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, env={**ENVIRONMENT, "PATH": path}, check=False
    )
    assert (done.stdout.splitlines(), done.stderr) == (["generate", "--mode", "xpress"], "")


# Usage errors: exit 2, nothing on standard output


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("bild --out x", "No such command 'bild'. Did you mean 'build'?"),
        ("generate", "Missing argument 'BUNDLE'"),
        ("generate b", "give the prompt once: --prompt TEXT, --prompt-file F, or - for standard input"),
        ("generate b --prompt x --prompt-file y", "give the prompt once"),
        ("generate b - --prompt x", "give the prompt once"),
        ("generate b --prompt=", "the prompt from the command line is empty"),
        ("generate b --prompt x --mode fast", "'fast' is not one of 'target', 'dflash', 'xpress'"),
        ("generate b --prompt x --max-new-tokens 0", "0 is not in the range x>=1"),
        ("generate b --prompt x --promt y", "No such option '--promt'"),
        ("generate b --prompt-file missing.txt", "cannot read the prompt from missing.txt: No such file"),
        ("build --target t", "Missing option '--out'"),
        ("build --out o", "give either --target (with --drafter and --refiner) or --preset"),
        ("build --out o --target t --preset smollm2-135m", "give either --target"),
        ("build --out o --preset smollm2-135m --drafter d", "--preset brings its own drafter and refiner"),
        ("build --out o --target t --refiner r", "give --drafter too"),
        ("build --out o --target t --platform toaster", "'toaster' is not one of 'cpu'"),
        ("build --out o --target t --precision fp12", "'fp12' is not one of 'fp32', 'fp16'"),
    ],
)
def test_usage_errors(args: str, message: str, call: Callable[..., Done]) -> None:
    done = call(*args.split())
    assert (done.code, done.out) == (2, "")
    assert message in done.message
    assert f"Try 'xpress-export {args.split(maxsplit=1)[0]}".replace(" bild", "") in done.message


@pytest.mark.parametrize("option", ["--prompt", "--system", "--stop"])
def test_text_that_is_not_utf8(option: str, call: Callable[..., Done]) -> None:
    prompt = [] if option == "--prompt" else ["--prompt", "x"]
    done = call("generate", "b", *prompt, option, os.fsdecode(b"caf\xe9"))
    assert (done.code, done.out) == (2, "")
    assert f"Invalid value for '{option}': is not UTF-8" in done.message


def test_prompt_files_that_cannot_be_used(call: Callable[..., Done], tmp_path: Path) -> None:
    for content, message in ((b"caf\xe9!", "is not UTF-8 (byte 3)"), (b"", "is empty")):
        (tmp_path / "prompt").write_bytes(content)
        done = call("generate", "b", "--prompt-file", tmp_path / "prompt")
        assert (done.code, done.out) == (2, "")
        assert f"the prompt from {tmp_path / 'prompt'} {message}" in done.message
    done = call("generate", "b", "--prompt-file", tmp_path)
    assert (done.code, "Is a directory" in done.message) == (2, True)


def test_empty_standard_input(tiny_bundle: Path) -> None:
    done = run("generate", tiny_bundle, "-")
    assert (done.code, done.out) == (2, "")
    assert "the prompt from standard input is empty" in done.message


# Errors of ours: exit 1, one message, nothing on standard output


def refused(done: Done, *parts: str) -> None:
    """Check that a command ended with one message that has all `parts`, in one line where nobody watches."""
    assert (done.code, done.out) == (1, "")
    assert done.err.startswith("error: ") and done.err.count("\n") == 1
    for part in parts:
        assert part in done.err


def test_paths_that_are_no_bundles(tiny_trio: Any, call: Callable[..., Done], tmp_path: Path) -> None:
    for command in (("generate", "--prompt", "x"), ("inspect",)):
        refused(call(*command, tmp_path / "missing"), "missing does not exist", "xpress-export build")
        refused(call(*command, tiny_trio.target), "is a checkpoint, not a bundle", "xpress-export build")
        refused(call(*command, tmp_path), "has no manifest.json", "xpress-export build")


def test_requests_that_a_bundle_cannot_honour(
    tiny_bundle: Path, scripted_bundle: Any, call: Callable[..., Done]
) -> None:
    def generate(*options: str) -> Done:
        return call("generate", tiny_bundle, *options)

    context = read_manifest(tiny_bundle).max_context
    refused(generate("--prompt", "hello " * 700), "the prompt has", f"the context of this bundle {context}")
    refused(generate("--prompt", "x", "--max-new-tokens", str(context)), f"max_new_tokens is {context}", "has room for")
    refused(generate("--prompt", "x", "--draft-tokens", "99"), "num_draft_tokens is 99", "at most 7")
    refused(generate("--prompt", "x", "--stop", ""), "stop[0] has 0 characters")
    base_model = scripted_bundle(text={"chat_template": None})
    done = call("generate", base_model, "--prompt", "x", "--chat")
    assert (done.code, "this model has no chat template; leave out --chat" in done.message) == (2, True)
    assert call("generate", base_model, "--prompt", "x", "--max-new-tokens", "2").code == 0


@pytest.mark.usefixtures("quick_build")
def test_builds_that_are_refused(tiny_trio: Any, call: Callable[..., Done], tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (work / "thesis.txt").write_text("mine")
    out = tmp_path / "out"

    def build(*options: str | Path, out: Path = out) -> Done:
        return call("build", *options, "--out", out)

    refused(build("--target", tmp_path / "nothing"), "nothing does not exist", "Hugging Face id")
    refused(build("--target", tiny_trio.drafter), "describes a drafter, not a target")
    refused(build("--target", tiny_trio.target, "--drafter", tiny_trio.target), "not a dFlash drafter")
    refused(build("--target", tiny_trio.target, "--max-context", "9999"), "max_context is 9999", "640")
    refused(build("--target", tiny_trio.target, out=work), "holds 'thesis.txt', which no bundle has")
    refused(build("--target", tiny_trio.target, out=work / "thesis.txt"), "is a file")
    assert sorted(tmp_path.rglob("*")) == [work, work / "thesis.txt"]
    assert (work / "thesis.txt").read_text() == "mine"


def test_names_are_shown_as_they_are(call: Callable[..., Done], tmp_path: Path) -> None:
    """Neither as markup nor as emoji codes."""
    refused(call("inspect", tmp_path / "[bold]x[/bold] :smile:"), "[bold]x[/bold] :smile: does not exist")


# Generating


def test_streaming_and_json_give_the_same_text(tiny_bundle: Path) -> None:
    for mode, prompt in (("xpress", "naïve 日本語 🙂"), ("target", "the drafter")):
        command = ("generate", tiny_bundle, "--prompt", prompt, "--max-new-tokens", "60", "--mode", mode)
        streamed, as_json = run(*command), run(*command, "--json", "-vv")
        assert (streamed.code, as_json.code) == (0, 0)
        assert as_json.out.endswith("}\n") and as_json.out.count("\n") == 1
        answer = json.loads(as_json.out)
        assert answer.keys() == {"text", "token_ids", "finish_reason", "stats"}
        assert streamed.out == answer["text"] + "\n"
        assert len(answer["token_ids"]) == answer["stats"]["num_generated_tokens"] > 0
        assert answer["stats"].keys() >= STATS
        assert "prompt token ids: [" in as_json.err and "prompt token ids" not in streamed.err
        assert re.search(rf"tokens \(.+\), .+ tokens/s, tau .+\nmode {mode}, executed on CPU, bundle", streamed.err)


def test_reports_name_the_device_that_ran(
    tiny_bundle: Path, call: Callable[..., Done], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU stands in for the GPU that a runtime was opened on."""
    from xpress_export import cli_device
    from xpress_export.runtime import devices
    from xpress_export.runtime.device_cpu import CpuDevice

    monkeypatch.setattr(devices, "choose", lambda *_: devices.Choice(2, "onnxruntime", "it was asked for"))
    monkeypatch.setattr(devices, "open_device", lambda choice, threads, *_: CpuDevice(threads))
    monkeypatch.setattr(cli_device, "find_gpu", lambda index: Gpu(f"Test GPU {index}", 89, 580))
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "the target"}\n')
    few = ("--max-new-tokens", "4")
    assert "executed on cuda:2, Test GPU 2, bundle" in call("generate", tiny_bundle, "--prompt", "x", *few).err
    assert (
        call("eval", tiny_bundle, "--prompts", tmp_path / "prompts.jsonl", *few).out.find("on cuda:2, Test GPU 2") > 0
    )
    bench = call("bench", tiny_bundle, "--concurrency", "1", "--rounds", "1", "--requests", "1", "--json", *few)
    assert json.loads(bench.out)["executed_on"] == "cuda:2, Test GPU 2"


def test_a_prompt_is_the_same_from_everywhere(tiny_bundle: Path, tmp_path: Path) -> None:
    prompt = "the target 日本\n"
    (tmp_path / "prompt.txt").write_text(prompt, encoding="utf-8")
    options = ("--max-new-tokens", "8", "--json")
    answers = [
        run("generate", tiny_bundle, "--prompt", prompt, *options),
        run("generate", tiny_bundle, "--prompt-file", tmp_path / "prompt.txt", *options),
        run("generate", tiny_bundle, "-", *options, stdin=prompt.encode()),
        run("generate", tiny_bundle, "-", *options, stdin=b"another"),
    ]
    ids = [json.loads(answer.out)["token_ids"] for answer in answers]
    assert ids[0] == ids[1] == ids[2] != ids[3]


def test_options_reach_the_decoder(tiny_bundle: Path, call: Callable[..., Done]) -> None:
    def stats(*options: str) -> dict[str, Any]:
        done = call("generate", tiny_bundle, "--prompt", "x", "--max-new-tokens", "30", "--json", *options)
        return json.loads(done.out)  # type: ignore[no-any-return]

    plain = stats("--mode", "target")
    assert plain["stats"]["num_draft_tokens"] == 0
    assert stats("--draft-tokens", "2")["stats"]["acceptance_histogram"][3:] == []
    assert stats("--refine-passes", "0")["stats"]["num_refine_passes"] == 0 < stats()["stats"]["num_refine_passes"]
    assert stats("--raw")["stats"]["num_prompt_tokens"] < plain["stats"]["num_prompt_tokens"]
    assert stats("--system", "be brief")["stats"]["num_prompt_tokens"] > plain["stats"]["num_prompt_tokens"]
    stop = plain["text"][2:4]
    stopped = stats("--stop", stop)
    assert (stopped["text"], stopped["finish_reason"]) == (plain["text"][: plain["text"].index(stop)], "stop")


def test_sampling_options_reach_the_sampler(tiny_bundle: Path, call: Callable[..., Done]) -> None:
    def generate(*options: str) -> Done:
        return call("generate", tiny_bundle, "--prompt", "x", "--max-new-tokens", "20", "--ignore-eos", *options)

    def ids(*options: str) -> list[int]:
        return json.loads(generate("--json", *options).out)["token_ids"]  # type: ignore[no-any-return]

    greedy, warm = ids(), ("--temperature", "1.5", "--seed", "5", "--top-k", "50", "--top-p", "0.9", "--min-p", "0.01")
    assert ids(*warm, "--mode", "target") == ids(*warm, "--mode", "xpress") == ids(*warm) != greedy
    assert ids(*warm[:2], "--seed", "6") != ids(*warm[:2], "--seed", "7")
    assert ids("--logit-bias", f"{greedy[0]}=-50")[0] != greedy[0]
    assert ids("--stop-token-id", str(greedy[4])) == greedy[: greedy.index(greedy[4]) + 1]
    penalised = [ids(f"--{name}-penalty", "1.9") for name in ("repetition", "presence", "frequency")]
    assert all(answer != greedy for answer in penalised)
    answer = json.loads(generate("--json", "--logprobs", "2").out)
    assert [entry["token_id"] for entry in answer["logprobs"]] == greedy
    assert all(len(entry["top"]) == 2 and entry["top"][0][0] == entry["token_id"] for entry in answer["logprobs"])
    assert "seed 5, executed on CPU" in generate(*warm).err
    refused(generate("--temperature", "-1"), "temperature must be between 0 and 100, got -1.0")
    refused(generate("--top-p", "0"), "top_p must be above 0")
    assert "'five' is not ID=VALUE, such as 42=-5" in generate("--logit-bias", "five").err
    assert "--logprobs needs --json" in generate("--logprobs", "2").err


def test_a_locale_without_unicode(tiny_bundle: Path) -> None:
    command = ("generate", tiny_bundle, "--prompt", "日本", "--max-new-tokens", "40")
    expected = json.loads(run(*command, "--json").out)["text"]
    assert not expected.isascii()
    streamed, as_json = (run(*command, *more, PYTHONIOENCODING="ascii") for more in ((), ("--json",)))
    assert streamed.out == expected.encode("ascii", "replace").decode() + "\n"
    assert as_json.out.isascii() and json.loads(as_json.out)["text"] == expected


def test_text_is_written_untouched_to_a_pipe_and_harmless_to_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    chunks = [SimpleNamespace(text=text) for text in ("a\x1b[31m", "b\n\tc\r\x9b", "日")]
    cli_generate._stream(iter(chunks))
    assert capsys.readouterr().out == "a\x1b[31mb\n\tc\r\x9b日\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    cli_generate._stream(iter(chunks))
    assert capsys.readouterr().out == "a␛[31mb\n\tc␍\ufffd日\n"


def test_untrained_drafters_are_called_so(tiny_bundle: Path, call: Callable[..., Done]) -> None:
    assert read_manifest(tiny_bundle).draft is not None
    drafted, plain = (
        call("generate", tiny_bundle, "--prompt", "x", "--max-new-tokens", "2", "--mode", mode)
        for mode in ("dflash", "target")
    )
    assert "untrained" in drafted.err and "untrained" not in plain.err


def test_a_closed_pipe_is_no_error(tiny_bundle: Path) -> None:
    for command in (["generate", tiny_bundle, "--prompt", "x", "--ignore-eos"], ["inspect", tiny_bundle]):
        with start(*command) as producer:
            assert producer.stdout is not None and producer.stderr is not None
            assert producer.stdout.read(3)
            producer.stdout.close()
            assert producer.stderr.read() == b""
        assert producer.returncode in {0, 1}


# Inspecting


def test_inspect(tiny_bundle: Path, call: Callable[..., Done]) -> None:
    manifest = read_manifest(tiny_bundle)
    done = call("inspect", tiny_bundle)
    assert (done.code, done.err) == (0, "")
    for part in (manifest.digest[:16], "UNTRAINED", "past_key_0", "transformers", *(f.path for f in manifest.files)):
        assert part in done.out
    as_json = call("inspect", tiny_bundle, "--json")
    assert as_json.out == (tiny_bundle / "manifest.json").read_text()
    assert "every file matches" in call("inspect", tiny_bundle, "--verify").out


def test_a_fused_bundle_says_so(tiny_trio: Any, quick_build: None, tmp_path: Path, call: Callable[..., Done]) -> None:
    sources = ("--target", tiny_trio.target, "--drafter", tiny_trio.drafter, "--layout", "fused", "--max-context", 600)
    done = call("build", *sources, "--out", tmp_path / "bundle")
    assert done.code == 0 and "target + drafter, fused layout, fp32" in done.out, done.err
    assert "the graphs of its parts" in done.out
    assert "is valid and was reused" in call("build", *sources, "--out", tmp_path / "bundle").out
    shown = call("inspect", tmp_path / "bundle").out
    for part in (
        "fused: a cycle is one graph, in fp32",
        "draft_past_key_0 ... draft_past_value_1 (4)",
        "graphs/step.onnx",
    ):
        assert part in shown


def test_a_fused_layout_needs_a_drafter(tmp_path: Path, call: Callable[..., Done]) -> None:
    done = call("build", "--target", "t", "--layout", "fused", "--out", tmp_path / "bundle")
    assert done.code == 2 and "--layout fused drafts in its step: give --drafter, or leave the layout split" in done.err


def test_inspect_verify_names_a_damaged_file(scripted_bundle: Any, call: Callable[..., Done]) -> None:
    bundle = scripted_bundle()
    damage(bundle)
    assert call("inspect", bundle).code == 0
    refused(call("inspect", bundle, "--verify"), "target.data")


def damage(bundle: Path) -> None:
    """Flip one bit in the middle of the weights."""
    with (bundle / "graphs" / "target.data").open("r+b") as stream:
        stream.seek(1000)
        byte = stream.read(1)[0]
        stream.seek(1000)
        stream.write(bytes([byte ^ 1]))


def test_doctor_names_gpus_and_what_is_missing(monkeypatch: pytest.MonkeyPatch, call: Callable[..., Done]) -> None:
    gpus = [Gpu("NVIDIA L4", 89, 575), Gpu("Orin", 87, None)]
    monkeypatch.setattr(doctor, "find_gpu", lambda index: (*gpus, None)[index])
    version = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda package: None if package == "gguf" else version(package))
    shown = call("doctor").out
    assert "NVIDIA L4, compute capability 8.9, driver 575; Orin, compute capability 8.7" in shown
    assert re.search(r"no +export checkpoints +pip install 'xpress-export\[export\]'", shown)
    assert json.loads(call("doctor", "--json").out)["gpus"][1] == {"name": "Orin", "sm": 87, "driver": None}


def test_doctor(call: Callable[..., Done]) -> None:
    facts = json.loads(call("doctor", "--json").out)
    assert facts["packages"]["torch"] and "CPUExecutionProvider" in facts["onnxruntime_providers"]
    assert all(c["available"] == (not c["missing"]) == (c["fix"] is None) for c in facts["capabilities"])
    shown = call("doctor")
    assert (shown.code, shown.err) == (0, "")
    assert all(name in shown.out for name in facts["packages"])


# Streams: no escape codes where nobody looks, colours only where wanted


def test_pipes_get_no_escape_codes(tiny_bundle: Path) -> None:
    for command in (["doctor"], ["inspect", tiny_bundle, "--verify"], ["generate", tiny_bundle, "--prompt", "x"]):
        done = run(*command, TERM="xterm-256color")
        assert done.code == 0 and ESCAPE not in done.out + done.err


@dataclass
class Terminal:
    """A process on a pseudo-terminal of 80 columns."""

    process: subprocess.Popen[bytes]
    master: int

    def read(self, timeout: float = 60) -> str:
        """All it prints until it ends."""
        deadline, found = time.monotonic() + timeout, b""
        with contextlib.suppress(OSError):  # the other end is closed
            while time.monotonic() < deadline:
                if select.select([self.master], [], [], 0.1)[0]:
                    found += os.read(self.master, 65536) or b""
                elif self.process.poll() is not None:
                    break
        self.process.wait(timeout=10)
        os.close(self.master)
        return found.decode()


def on_terminal(*args: str | Path, **environment: str) -> Terminal:
    master, slave = pty.openpty()
    environment = {**ENVIRONMENT, "TERM": "xterm-256color", "COLUMNS": "80", **environment}
    process = subprocess.Popen(
        [*PROGRAM, *map(str, args)], stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True
    )
    os.close(slave)
    return Terminal(process, master)


def plain(shown: str) -> str:
    """What a terminal was sent, without its control sequences."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)


def test_a_terminal_shows_progress_then_the_text(tiny_bundle: Path) -> None:
    command = ("generate", tiny_bundle, "--prompt", "x", "--max-new-tokens", "20")
    text = json.loads(run(*command, "--json").out)["text"]
    shown = {
        name: on_terminal(*command, **more).read() for name, more in {"colours": {}, "none": {"NO_COLOR": "1"}}.items()
    }
    for screen in shown.values():
        assert "Opening the bundle" in screen and "Reading the prompt" in screen
        assert text.translate(cli_generate._VISIBLE).replace("\n", "\r\n") in plain(screen)
        assert all(len(line) <= 80 for line in plain(screen).splitlines())
    colour = re.compile(r"\x1b\[[0-9;]*\b(3|4|9)\d")
    assert colour.search(shown["colours"]) and not colour.search(shown["none"])


def test_interrupting_generate(tiny_bundle: Path) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        with start("generate", tiny_bundle, "--prompt", "x", "--ignore-eos") as process:
            assert process.stdout is not None
            assert process.stdout.read(2)
            process.send_signal(number)
            out, err = process.communicate(timeout=30)
        assert process.returncode in INTERRUPTED
        assert err.decode().strip() == "interrupted"
        assert out.endswith(b"\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_that_python_drops_comes_again(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch, call: Callable[..., Done]
) -> None:
    """Exceptions in `__del__` and weak reference callbacks go nowhere; seen when a build was stopped in mid-trace."""

    class Unlucky:
        def __del__(self) -> None:
            signal.raise_signal(number)
            time.sleep(1)

    def examine() -> None:
        Unlucky()
        time.sleep(30)

    monkeypatch.setattr(doctor, "examine", examine)
    start_s = time.monotonic()
    done = call("doctor")
    assert (done.code, done.err.strip()) == (130, "interrupted")
    assert time.monotonic() - start_s < 10


# Building: complete or not at all


@pytest.fixture(scope="module")
def small_target(tiny_trio: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first layer of the tiny target: quick to trace."""
    folder = tmp_path_factory.mktemp("small") / "target"
    shutil.copytree(tiny_trio.target, folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_hidden_layers": 1, "layer_types": config.get("layer_types", ["full_attention"])[:1]}
    (folder / "config.json").write_text(json.dumps(config))
    weights = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in weights.items() if not re.search(r"layers\.[1-9]", name)}
    assert 0 < len(kept) < len(weights)
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@dataclass
class Interrupted:
    """A build that got a signal while it was tracing: how it ended, and what lay beside `out` after it."""

    code: int
    err: str
    out: Path
    left: list[str]


@pytest.fixture(scope="module")
def interrupted(small_target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[signal.Signals, Interrupted]:
    """Three builds at a time, each of them stopped another way."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
    outs = {number: tmp_path_factory.mktemp(number.name) / "bundle" for number in numbers}
    ended = {}
    with contextlib.ExitStack() as stack:
        running = {n: stack.enter_context(start("build", "--target", small_target, "--out", outs[n])) for n in numbers}
        stack.callback(lambda: [process.kill() for process in running.values()])
        waiting = set(numbers)
        while waiting:
            for number in sorted(waiting):
                assert running[number].poll() is None, "the build ended before it could be interrupted"
                if list(outs[number].parent.glob(".bundle.partial-*/graphs")):
                    running[number].send_signal(number)
                    waiting.remove(number)
            time.sleep(0.02)
        for number, process in running.items():
            _, err = process.communicate(timeout=60)
            left = sorted(os.listdir(outs[number].parent))
            ended[number] = Interrupted(process.returncode, err.decode(), outs[number], left)
    return ended


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupting_build_leaves_nothing(
    interrupted: dict[signal.Signals, Interrupted], number: signal.Signals
) -> None:
    build = interrupted[number]
    assert build.code in INTERRUPTED
    assert (build.err.strip(), build.left) == ("interrupted", [])


def test_killing_build_leaves_no_bundle_and_the_next_build_cleans_up(
    interrupted: dict[signal.Signals, Interrupted], small_target: Path
) -> None:
    """The next build runs on a terminal, and shows where it is and how long it will take."""
    killed = interrupted[signal.SIGKILL]
    assert killed.code == -signal.SIGKILL
    assert [name.startswith(".bundle.partial-") for name in killed.left] == [True]
    terminal = on_terminal("build", "--target", small_target, "--out", killed.out)
    shown = terminal.read()
    assert terminal.process.returncode == 0, shown
    assert os.listdir(killed.out.parent) == ["bundle"]
    assert open_bundle(killed.out).roles == ("target",)
    for step in ("Loading PyTorch", "Reading checkpoints", "Tracing target", "Checking target"):
        assert re.search(rf"✓ {step}.* \d+\.\d s", plain(shown)), step
    assert re.search(r"Tracing target .* \d+ s, about \d+ s left", plain(shown))
    assert f"bundle {killed.out} built: target, fp32" in " ".join(plain(shown).split())
    assert "share of wrong tokens" in shown


OWN = "[bold]own :smile:"


@pytest.fixture
def own_bundle(tiny_bundle: Path, tmp_path: Path) -> Path:
    """A copy of the tiny bundle as `build_command` would write it, for a test to spoil; its name is not markup."""
    folder = shutil.copytree(tiny_bundle, tmp_path / OWN)
    manifest = read_manifest(folder)
    assert manifest.draft is not None
    write_manifest(folder, dataclasses.replace(manifest, draft=dataclasses.replace(manifest.draft, trained=True)))
    return folder


@pytest.mark.usefixtures("quick_build")
def test_a_valid_bundle_is_reused(tiny_trio: Any, own_bundle: Path, call: Callable[..., Done]) -> None:
    before = {path: path.stat().st_mtime_ns for path in own_bundle.rglob("*")}
    done = call(*build_command(tiny_trio, own_bundle))
    assert (done.code, f"bundle {own_bundle} is valid and was reused" in done.out) == (0, True)
    assert {path: path.stat().st_mtime_ns for path in own_bundle.rglob("*")} == before


@pytest.mark.usefixtures("quick_build")
def test_a_damaged_bundle_is_built_again(tiny_trio: Any, own_bundle: Path, call: Callable[..., Done]) -> None:
    damage(own_bundle)
    done = call(*build_command(tiny_trio, own_bundle))
    assert (done.code, f"bundle {own_bundle} built: target + drafter + refiner" in done.out) == (0, True)
    assert re.match("warning: building again: .*target.data.*", done.err)
    open_bundle(own_bundle)
    assert os.listdir(own_bundle.parent) == [OWN]


def build_command(trio: Any, out: Path) -> list[str | Path]:
    models = ["--target", trio.target, "--drafter", trio.drafter, "--refiner", trio.refiner]
    return ["build", *models, "--max-context", str(trio.options().max_context), "--out", out]


@pytest.mark.usefixtures("quick_build")
def test_a_full_disk_is_one_message_and_leaves_nothing(
    tiny_trio: Any, tiny_bundle: Path, call: Callable[..., Done], tmp_path: Path
) -> None:
    """Two small filesystems: one too small from the start, one that fills up on the way."""
    total = read_manifest(tiny_bundle).num_bytes
    for size, message in ((total // 2, "are free; free"), (total - (8 << 10), "the disk is full")):
        with small_filesystem(tmp_path, size):
            refused(call(*build_command(tiny_trio, tmp_path / "bundle")), message)
            assert os.listdir(tmp_path) == []


@contextlib.contextmanager
def small_filesystem(folder: Path, num_bytes: int) -> Iterator[None]:
    mount = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "xpress-test", str(folder)]
    try:
        done = subprocess.run(mount, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no `mount` here")
    if done.returncode:
        pytest.skip(f"a small filesystem cannot be mounted here: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


# Defects and missing packages


def test_a_defect_is_one_message_and_a_traceback_only_on_demand(
    monkeypatch: pytest.MonkeyPatch, call: Callable[..., Done]
) -> None:
    def broken() -> None:
        raise ValueError("[boom]")

    monkeypatch.setattr(doctor, "examine", broken)
    for options in ([], ["-v"]):
        done = call("doctor", *options)
        assert (done.code, done.out) == (1, "")
        assert done.err.startswith("internal error: ValueError: [boom]\n")
        assert "-vv" in done.err and "Traceback" not in done.err
    for options in (["-vv", "doctor"], ["doctor", "-vv"], ["-v", "doctor", "-v"]):
        assert "Traceback" in call(*options).err


@pytest.mark.parametrize(
    ("package", "command", "extra"),
    [
        ("torch", "build --target t --out o", "export"),
        ("onnx_ir", "build --target t --out o", "export"),
        ("onnxruntime", "generate {bundle} --prompt x", "cpu"),
        ("onnxruntime", "doctor", ""),
    ],
)
def test_a_missing_package_is_named_with_its_extra(
    package: str, command: str, extra: str, tiny_bundle: Path, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "class Block:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.partition('.')[0] == {package!r}:\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Block())\n"
    )
    path = os.pathsep.join([str(tmp_path), ENVIRONMENT.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    done = run(*command.format(bundle=tiny_bundle).split(), PYTHONPATH=path)
    if extra:
        refused(done, f"{package.replace('_', '-')} is needed to", f"pip install 'xpress-export[{extra}]'")
    else:
        assert (done.code, done.err) == (0, "")
        assert "none usable" in done.out
