"""Prompts, chat templates and the two files of a bundle's text side: what is accepted and what is refused."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from xpress_export.errors import BundleError, RequestError
from xpress_export.runtime.text import TextCodec

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
USER = [{"role": "user", "content": "Hi"}]


def write_folder(folder: Path, tokenizer: Tokenizer, **changes: object) -> Path:
    text = {"chat_template": CHATML, "bos_token": None, "eos_token": None, "pad_token": None}
    text |= {"unk_token": None, "stop_token_ids": [2], "add_bos": False}
    text |= {"vocab_size": tokenizer.get_vocab_size()} | changes
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "text.json").write_text(json.dumps(text), "utf-8")
    return folder


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Bytes only: 256 of them after three special tokens."""
    special = ["<|end|>", "<|im_start|>", "<|im_end|>"]
    names = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    return tokenizer


@pytest.fixture(scope="module")
def codec(tokenizer, tmp_path_factory) -> TextCodec:
    return TextCodec.open(write_folder(tmp_path_factory.mktemp("codec"), tokenizer))


def test_encode_refuses_a_lone_surrogate(codec):
    with pytest.raises(RequestError, match="the prompt holds a lone surrogate at character 1"):
        codec.encode("a\ud83d")


def test_render_chat_appends_the_generation_prompt(codec):
    expected = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert codec.render_chat(USER) == expected
    assert codec.render_chat(USER, add_generation_prompt=False) == expected[: -len("<|im_start|>assistant\n")]
    ids = codec.encode_chat(USER)
    assert ids[0] == 1 and ids.count(1) == 2 and ids.count(2) == 1


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ messages | tojson }}", '[{"role": "user", "content": "Hi"}]'),
        ("{{ '<é>' | tojson }}", '"<é>"'),
        ("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "1"),
        ("a{% generation %}b{% endgeneration %}c", "abc"),
        ("{% if tools is none and eos_token is undefined %}yes{% endif %}", "yes"),
        ("  {% if true %}\nline\n  {% endif %}\n", "line\n"),
        ("{{ strftime_now('%Y') }}", str(datetime.now().year)),
        ("{{ enable_thinking }}", "False"),
    ],
)
def test_template_features(tmp_path, tokenizer, template, expected):
    codec = TextCodec.open(write_folder(tmp_path, tokenizer, chat_template=template))
    assert codec.render_chat(USER, enable_thinking=False) == expected


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('no system role here') }}", "no system role here"),
        ("{{ messages[0].absent.field }}", "no attribute 'absent'"),
        ("{{ 1 // 0 }}", "division"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe|not safely callable"),
        (None, "no chat template"),
    ],
)
def test_template_errors_are_request_errors(tmp_path, tokenizer, template, message):
    codec = TextCodec.open(write_folder(tmp_path, tokenizer, chat_template=template))
    with pytest.raises(RequestError, match=message):
        codec.render_chat(USER)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("Hi", "messages must be a list, got str"),
        ([], "messages is empty"),
        (["Hi"], r"messages\[0\] must be an object"),
        ([{"content": "Hi"}], r"messages\[0\]\.role is missing"),
        ([*USER, {"role": "user"}], r"messages\[1\]\.content is missing"),
        ([{"role": "robot", "content": "Hi"}], r"messages\[0\]\.role is 'robot'"),
        ([{"role": 7, "content": "Hi"}], r"messages\[0\]\.role must be a string, got int"),
        ([{"role": "user", "content": None}], r"messages\[0\]\.content must be a string, got NoneType"),
        ([{"role": "user", "content": "\udc00"}], r"messages\[0\]\.content holds a lone surrogate"),
        ([*USER, {"role": "user", "content": "", "x": [object()]}], r"messages\[1\]\.x\[0\] must be made of"),
    ],
)
def test_bad_messages_are_refused_by_name(codec, messages, message):
    with pytest.raises(RequestError, match=message):
        codec.encode_chat(messages)


def test_template_arguments_must_be_plain(codec):
    with pytest.raises(RequestError, match=r"template_args\.tools must be made of JSON values, got set"):
        codec.render_chat(USER, tools={1})


# Files.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"extra": 1}, "field 'extra' is unknown"),
        ({"add_bos": 1}, "field 'add_bos' must be true or false, got 1"),
        ({"stop_token_ids": [True]}, "field 'stop_token_ids' must be a list of token ids"),
        ({"stop_token_ids": 2}, "field 'stop_token_ids' must be a list of token ids"),
        ({"vocab_size": "9"}, "field 'vocab_size' must be a positive integer"),
        ({"vocab_size": 9}, "holds 259 tokens but text.json says 9"),
        ({"bos_token": 3}, "field 'bos_token' must be a string or null, got 3"),
        ({"add_bos": True}, "asks for BOS but its bos_token None is no token"),
        ({"chat_template": "{% if %}"}, "the chat template does not compile: line 1"),
    ],
)
def test_bad_text_json_is_refused(tmp_path, tokenizer, changes, message):
    folder = write_folder(tmp_path, tokenizer, **changes)
    with pytest.raises(BundleError, match=re.escape(message)):
        TextCodec.open(folder)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("text.json", None, "text.json is missing"),
        ("text.json", "{", "cannot be read as JSON"),
        ("text.json", "[]", "must hold one JSON object, got list"),
        ("text.json", '{"add_bos": true}', "field 'bos_token' is missing"),
        ("tokenizer.json", None, "tokenizer.json is missing"),
        ("tokenizer.json", "{}", "is not a tokenizer this version of tokenizers can read"),
    ],
)
def test_missing_or_damaged_files_are_refused(tmp_path, tokenizer, name, content, message):
    path = write_folder(tmp_path, tokenizer) / name
    path.unlink()
    if content is not None:
        path.write_text(content, "utf-8")
    with pytest.raises(BundleError, match=message):
        TextCodec.open(tmp_path)


def test_import_needs_no_framework():
    code = (
        "import sys, xpress_export.runtime.text; "
        "print(sorted({'torch', 'transformers', 'onnx', 'onnxruntime'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
