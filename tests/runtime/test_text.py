"""Codec, stream decoder and stop handling, checked against the tokenizers library and brute force."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from xpress_export.errors import BundleError, RequestError
from xpress_export.runtime.text import StreamDecoder, TextCodec, TextStream

CORPUS = [
    "Speculative decoding drafts a block of tokens and verifies it, 2024.",
    "naïve café 文字 👩‍🚀 🎉 the end\nof the line. User: Assistant:",
    "abababab aabaab END STOP stop ### ```python\nprint('x')\n```",
]
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
USER = [{"role": "user", "content": "Hi"}]


def byte_level_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<|end|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens(["<think>", "  two spaces  "])
    return tokenizer


def _metaspace_bpe(texts: list[str]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """A SentencePiece-like vocabulary: <unk>, <s>, </s>, 256 byte tokens, then pieces with ▁ for a space."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=90, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocab = {token: i for i, token in enumerate(names)}
    vocab |= {token: len(names) + i for token, i in model["vocab"].items()}
    return vocab, [tuple(pair) for pair in model["merges"]]


def byte_fallback_tokenizer() -> Tokenizer:
    vocab, merges = _metaspace_bpe([re.sub(r"[^ -~]", "", text) for text in CORPUS])
    model = models.BPE(vocab, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def metaspace_tokenizer() -> Tokenizer:
    vocab, merges = _metaspace_bpe(CORPUS)
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def write_folder(folder: Path, tokenizer: Tokenizer, **changes: object) -> Path:
    text = {"chat_template": CHATML, "bos_token": None, "eos_token": None, "pad_token": None}
    text |= {"unk_token": None, "stop_token_ids": [2], "add_bos": False}
    text |= {"vocab_size": tokenizer.get_vocab_size()} | changes
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "text.json").write_text(json.dumps(text), "utf-8")
    return folder


BUILDERS = {
    "byte-level": byte_level_tokenizer,
    "byte-fallback": byte_fallback_tokenizer,
    "metaspace": metaspace_tokenizer,
}


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, Tokenizer]:
    return {kind: build() for kind, build in BUILDERS.items()}


@pytest.fixture(scope="module")
def all_codecs(tokenizers, tmp_path_factory) -> dict[str, TextCodec]:
    return {
        kind: TextCodec.open(write_folder(tmp_path_factory.mktemp(kind), tokenizer))
        for kind, tokenizer in tokenizers.items()
    }


@pytest.fixture(params=list(BUILDERS), scope="module")
def kind(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def codec(all_codecs, kind) -> TextCodec:
    return all_codecs[kind]


@pytest.fixture(scope="module")
def tokenizer(tokenizers, kind) -> Tokenizer:
    return tokenizers[kind]


@pytest.fixture(scope="module")
def byte_level(all_codecs) -> TextCodec:
    return all_codecs["byte-level"]


@pytest.fixture(scope="module")
def byte_fallback(all_codecs) -> TextCodec:
    return all_codecs["byte-fallback"]


def split_into_blocks(ids: list[int], cuts: list[int]) -> list[list[int]]:
    edges = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    return [ids[start:end] for start, end in pairwise(edges)]


def token_lists(codec: TextCodec) -> st.SearchStrategy[list[int]]:
    """Random ids, out-of-vocabulary and special ones included, mixed with the tokens of real text."""
    tail = "👩‍🚀🎉文字é".encode()
    pieces = {i: codec.pieces.get(i, first=False) for i in range(codec.config.vocab_size)}
    multibyte = [i for i, piece in pieces.items() if piece and len(piece) == 1 and piece in tail]
    anything = st.integers(0, codec.config.vocab_size + 3)
    token = st.one_of(anything, st.sampled_from(multibyte)) if multibyte else anything
    text = st.one_of(st.sampled_from(["👩‍🚀🎉", "文字 x", "\ufffd", " END", "\n\n", "  "]), st.text(max_size=6))
    chunk = st.one_of(st.lists(token, max_size=6), text.map(codec.encode))
    return st.lists(chunk, max_size=5).map(lambda chunks: [i for chunk in chunks for i in chunk])


CUTS = st.lists(st.integers(0, 200), max_size=6)


# Decoding.


@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_stream_equals_decode_for_any_split(codec, data):
    ids = data.draw(token_lists(codec))
    decoder = StreamDecoder(codec)
    parts = [decoder.push(block) for block in split_into_blocks(ids, data.draw(CUTS))]
    assert "".join(parts) + decoder.flush() == codec.decode(ids)


@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_decode_equals_the_tokenizers_library(codec, tokenizer, kind, data):
    ids = data.draw(token_lists(codec))
    expected = tokenizer.decode(ids, skip_special_tokens=True)
    if kind == "byte-fallback" and "\ufffd" in expected:
        expected = decode_runs(tokenizer, ids)
    assert codec.decode(ids) == expected


def decode_runs(tokenizer: Tokenizer, ids: list[int]) -> str:
    """Byte-fallback text by definition: each run of byte tokens on its own, one U+FFFD per bad byte."""
    tokens = [tokenizer.id_to_token(i) for i in ids]
    text, run = "", b""
    for token in [*(t for t in tokens if t and t not in ("<unk>", "<s>", "</s>")), ""]:
        if re.fullmatch("<0x..>", token):
            run += bytes.fromhex(token[3:5])
        else:
            text += re.sub("[\udc80-\udcff]", "\ufffd", run.decode("utf-8", "surrogateescape"))
            text, run = text + token.replace("▁", " "), b""
    return text.removeprefix(" ")


@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_only_an_unfinished_character_is_held(codec, data):
    ids = data.draw(token_lists(codec))
    decoder, emitted = StreamDecoder(codec), ""
    for count, token_id in enumerate(ids, start=1):
        emitted += decoder.push([token_id])
        held = codec.decode(ids[:count]).removeprefix(emitted)
        assert held in ("", "\ufffd", "\ufffd\ufffd", "\ufffd\ufffd\ufffd")


def test_emoji_comes_out_whole_with_its_last_byte(byte_fallback):
    ids = [3 + byte for byte in "🎉".encode()]
    decoder = StreamDecoder(byte_fallback)
    assert [decoder.push([i]) for i in ids] == ["", "", "", "🎉"]
    assert decoder.flush() == ""


@pytest.mark.parametrize("name", ["byte-level", "byte-fallback"])
def test_genuine_replacement_character_is_not_held(all_codecs, name):
    codec = all_codecs[name]
    decoder = StreamDecoder(codec)
    assert decoder.push(codec.encode("a\ufffd")) == "a\ufffd"


def test_sequence_that_never_completes_is_given_up(byte_fallback):
    decoder = StreamDecoder(byte_fallback)
    lead = 3 + 0xF0
    assert decoder.push([lead]) == ""
    assert decoder.push([lead] * 10) == "\ufffd" * 10
    assert decoder.flush() == "\ufffd"


def test_valid_characters_of_a_damaged_run_survive(byte_fallback, tokenizers):
    ids = [3 + byte for byte in "🎉".encode() + b"\xf0\x9f"]
    assert byte_fallback.decode(ids) == "🎉\ufffd\ufffd"
    assert tokenizers["byte-fallback"].decode(ids) == "\ufffd" * 6  # the library gives up the whole run


def test_special_and_unknown_tokens_show_nothing(byte_level):
    hello = byte_level.encode("Hello")
    assert byte_level.decode([0, *hello, 1, 999_999]) == "Hello"
    with pytest.raises(RequestError, match="-1 is negative"):
        byte_level.decode([-1])


def test_stream_does_not_decode_history_again(byte_fallback, tokenizers, tmp_path):
    codec = TextCodec.open(write_folder(tmp_path, tokenizers["byte-fallback"]))
    ids = codec.encode("Speculative decoding 🎉") * 50
    expected = codec.decode(ids)  # every piece is known from here on
    codec.pieces._tokenizer = None
    decoder = StreamDecoder(codec)
    assert "".join(decoder.push([i]) for i in ids) + decoder.flush() == expected


@pytest.mark.parametrize("decoder", [decoders.WordPiece(), decoders.CTC(), decoders.Strip(" ", 0, 1)])
def test_decoder_that_cannot_be_streamed_is_refused(tmp_path, decoder):
    tokenizer = byte_level_tokenizer()
    tokenizer.decoder = decoder
    with pytest.raises(BundleError, match="cannot be streamed"):
        TextCodec.open(write_folder(tmp_path, tokenizer))


# Stopping.


def brute_force(codec: TextCodec, ids: list[int], stop_ids: set[int], stops: list[str]) -> tuple[str, int, bool]:
    """Text, tokens kept and whether it stopped, by decoding every prefix from scratch."""
    for count, token_id in enumerate(ids, start=1):
        if token_id in stop_ids:
            return codec.decode(ids[: count - 1]), count, True
        text = codec.decode(ids[:count])
        found = [text.index(stop) for stop in stops if stop in text]
        if found:
            return text[: min(found)], count, True
    return codec.decode(ids), len(ids), False


def run_stream(stream: TextStream, blocks: list[list[int]]) -> tuple[str, int, bool]:
    text, kept = "", 0
    for block in blocks:
        step = stream.push(block)
        assert step.finished == stream.finished
        text, kept = text + step.text, kept + step.num_kept
    finished = stream.finished
    return text + stream.flush(), kept, finished


@settings(deadline=None, max_examples=200)
@given(data=st.data())
def test_stream_stops_like_brute_force(codec, data):
    ids = data.draw(token_lists(codec))
    text = codec.decode(ids)
    offset = st.integers(0, max(len(text) - 1, 0))
    inside = st.tuples(offset, st.integers(1, 8)).map(lambda cut: text[cut[0] : cut[0] + cut[1]])
    stop = st.one_of(inside, st.text(alphabet="ab E", min_size=1, max_size=3))
    stops = [s for s in data.draw(st.lists(stop, max_size=3)) if s and "\ufffd" not in s]
    stop_ids = set(data.draw(st.lists(st.sampled_from(ids), max_size=1))) if ids else set()
    stream = TextStream(codec, stop_strings=stops, stop_token_ids=tuple(stop_ids))
    blocks = split_into_blocks(ids, data.draw(CUTS))
    assert run_stream(stream, blocks) == brute_force(codec, ids, stop_ids, stops)


@pytest.mark.parametrize("block", [1, 2, 3, 7, 100])
def test_stop_string_at_every_offset(codec, block):
    text = "aaabababac 文字🎉 END" if codec.pieces.byte_level else "aaabababac END of the end"
    ids = codec.encode(text)
    blocks = [ids[i : i + block] for i in range(0, len(ids), block)]
    for start in range(len(text)):
        for end in range(start + 1, len(text) + 1):
            stream = TextStream(codec, stop_strings=[text[start:end]], stop_token_ids=())
            expected = brute_force(codec, ids, set(), [text[start:end]])
            assert run_stream(stream, blocks) == expected
            assert expected[2] and stream.stopped_by == text[start:end]


@pytest.mark.parametrize("offset", range(5))
def test_stop_token_cuts_inside_a_block(byte_level, offset):
    ids = byte_level.encode("abcdefgh")[:4]
    block = [*ids[:offset], 2, *ids[offset:]]
    stream = TextStream(byte_level)
    step = stream.push(block)
    assert step == (byte_level.decode(ids[:offset]), offset + 1, True)
    assert stream.stopped_by == 2
    assert stream.push(ids) == ("", 0, True)
    assert stream.flush() == ""


def test_stop_token_that_is_not_special_shows_no_text(byte_level):
    word = byte_level.encode("<think>")
    assert len(word) == 1 and byte_level.decode(word) == "<think>"
    stream = TextStream(byte_level, stop_token_ids=word)
    assert stream.push(byte_level.encode("a<think>b")) == ("a", 2, True)


def test_stop_token_zero_is_reported(byte_level):
    stream = TextStream(byte_level, stop_token_ids=[0])
    assert stream.push([0]).finished
    assert stream.stopped_by == 0


def test_ignore_eos_keeps_stop_strings(byte_level):
    ids = [*byte_level.encode("one"), 2, *byte_level.encode(" two END three")]
    stream = TextStream(byte_level, stop_strings=["END"], ignore_eos=True)
    text, _, finished = run_stream(stream, [ids])
    assert (text, finished, stream.stopped_by) == ("one two ", True, "END")


def test_text_that_may_begin_a_stop_string_waits(byte_level):
    ids = {char: byte_level.encode(char) for char in "xEND"}
    stream = TextStream(byte_level, stop_strings=["END"])
    pushed = [stream.push(ids[char]).text for char in "xENEND"]
    assert pushed == ["x", "", "", "EN", "", ""]
    assert stream.finished


def test_held_text_comes_back_without_a_match(byte_level):
    stream = TextStream(byte_level, stop_strings=["END"])
    assert stream.push(byte_level.encode("the EN")).text == "the "
    assert stream.flush() == "EN"
    stopped = TextStream(byte_level, stop_strings=["END"])
    assert stopped.push([*byte_level.encode("the EN"), 2]).text == "the EN"


def test_earliest_of_several_stop_strings_wins(byte_level):
    word = byte_level.encode("<think>")  # one token that completes all three
    for stops in (["nk", "think", "in"], ["in", "think", "nk"]):
        stream = TextStream(byte_level, stop_strings=stops)
        assert stream.push(word) == ("<", 1, True)
        assert stream.stopped_by == "think"


def test_unfinished_character_before_a_stop_token_is_shown(byte_fallback):
    stream = TextStream(byte_fallback, stop_token_ids=[2])
    assert stream.push([3 + 0xF0, 3 + 0x9F, 2]) == ("\ufffd\ufffd", 3, True)


@pytest.mark.parametrize(
    ("stops", "message"),
    [
        ("END", "stop must be a list of strings, got str"),
        ([""], r"stop\[0\] has 0 characters"),
        (["a", "b" * 257], r"stop\[1\] has 257 characters"),
        (["a"] * 17, "stop holds 17 strings; at most 16"),
        ([3], r"stop\[0\] must be a string, got int"),
        (["\ud800"], r"stop\[0\] holds a lone surrogate at character 0"),
    ],
)
def test_bad_stop_strings_are_refused(byte_level, stops, message):
    with pytest.raises(RequestError, match=message):
        TextStream(byte_level, stop_strings=stops)


def test_largest_allowed_stop_strings_work(byte_level):
    stops = ["a" * 256, *(chr(97 + i) * 2 for i in range(1, 16))]
    stream = TextStream(byte_level, stop_strings=stops)
    ids = byte_level.encode("x" + "a" * 300)
    text, _, finished = run_stream(stream, [ids])
    assert (text, finished) == ("x", True)


# Prompts.


def test_encode_adds_bos_once(tmp_path, tokenizers):
    (tmp_path / "own").mkdir()
    own = TextCodec.open(write_folder(tmp_path / "own", tokenizers["byte-fallback"], bos_token="<s>", add_bos=True))
    assert own.encode("abab")[:2].count(1) == 1
    assert own.encode("abab")[0] == 1
    (tmp_path / "added").mkdir()
    added = TextCodec.open(write_folder(tmp_path / "added", tokenizers["metaspace"], bos_token="<s>", add_bos=True))
    assert added.encode("abab") == [1, *tokenizers["metaspace"].encode("abab").ids]


def test_chat_has_only_the_bos_its_template_writes(tmp_path, tokenizers):
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    folder = write_folder(tmp_path, tokenizers["byte-fallback"], chat_template=template, bos_token="<s>", add_bos=True)
    codec = TextCodec.open(folder)
    assert codec.render_chat(USER) == "<s>Hi"
    assert codec.encode_chat(USER).count(1) == 1


def test_training_truncation_and_padding_are_dropped(tmp_path):
    tokenizer = byte_level_tokenizer()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    codec = TextCodec.open(write_folder(tmp_path, tokenizer))
    text = "Speculative decoding drafts a block"
    assert codec.decode(codec.encode(text)) == text
    assert 4 < len(codec.encode(text)) < 64
