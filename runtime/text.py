"""Text in, token ids out, and back again, one committed block at a time.

A bundle's text side is two files: `tokenizer.json` (a `tokenizers` tokenizer) and `text.json`:

    field                                        type               meaning
    chat_template                                string or null     Jinja source, null for a base model
    bos_token, eos_token, pad_token, unk_token   string or null     what the template may name
    stop_token_ids                               list of int        ids that end a generation
    add_bos                                      bool               a raw completion starts with BOS
    vocab_size                                   int                tokens of tokenizer.json

Decoding works on bytes: every token adds a fixed piece of bytes to the text, so a stream costs the same per
token however long it is, and what it emits never depends on how the tokens were cut into blocks.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from xpress_export.errors import BundleError, RequestError

TOKENIZER_FILE = "tokenizer.json"
TEXT_FILE = "text.json"
ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256

_SPECIAL_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_ESCAPED_BYTE = re.compile("[\udc80-\udcff]")
# Decoder steps that map each token to its own text. Any other step looks at a token's neighbours.
_TOKENWISE_STEPS = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}


@dataclass(frozen=True, kw_only=True)
class TextConfig:
    """The fields of `text.json`."""

    chat_template: str | None
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    stop_token_ids: tuple[int, ...]
    add_bos: bool
    vocab_size: int

    @property
    def special_tokens(self) -> dict[str, str]:
        """The special tokens a template may name; one that is null stays undefined, as templates expect."""
        named = {name: getattr(self, name) for name in _SPECIAL_NAMES}
        return {name: token for name, token in named.items() if token is not None}


def _read_text_config(path: Path) -> TextConfig:
    try:
        raw = json.loads(path.read_text("utf-8"))
    except FileNotFoundError as err:
        raise BundleError(f"{path} is missing; export the bundle again") from err
    except (OSError, ValueError) as err:
        raise BundleError(f"{path} cannot be read as JSON: {err}") from err
    if not isinstance(raw, dict):
        raise BundleError(f"{path} must hold one JSON object, got {type(raw).__name__}")
    expected = {field.name for field in fields(TextConfig)}
    if wrong := sorted(expected ^ raw.keys()):
        problem = "unknown" if wrong[0] in raw else "missing"
        raise BundleError(f"{path}: field {wrong[0]!r} is {problem}; expected exactly {sorted(expected)}")
    for name, value in raw.items():
        _check_field(path, name, value)
    return TextConfig(**raw | {"stop_token_ids": tuple(raw["stop_token_ids"])})


def _check_field(path: Path, name: str, value: object) -> None:
    if name == "stop_token_ids":
        valid, wanted = isinstance(value, list) and all(map(_is_count, value)), "a list of token ids"
    elif name == "add_bos":
        valid, wanted = isinstance(value, bool), "true or false"
    elif name == "vocab_size":
        valid, wanted = _is_count(value) and value != 0, "a positive integer"
    else:
        valid, wanted = value is None or isinstance(value, str), "a string or null"
    if not valid:
        raise BundleError(f"{path}: field {name!r} must be {wanted}, got {value!r}")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


class _GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` marks assistant text for training; here it is only a scope."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as templates were written against: no HTML escapes (Jinja's own filter makes them)."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _compile_template(source: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as err:
        raise BundleError(f"the chat template does not compile: line {err.lineno}: {err.message}") from err


def _check_text(value: object, field: str) -> str:
    if not isinstance(value, str):
        raise RequestError(f"{field} must be a string, got {type(value).__name__}", field)
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as err:
        raise RequestError(
            f"{field} holds a lone surrogate at character {err.start}, which is not valid Unicode text", field
        ) from err
    return str.__str__(value)  # of a subclass: the plain text


def _check_plain(value: object, field: str) -> Any:
    """A copy made of plain JSON types: what a sandboxed template may safely be given."""
    if value is None or type(value) in (bool, int, float):
        return value
    if isinstance(value, Mapping):
        keys = [_check_text(key, f"a key of {field}") for key in value]
        return {key: _check_plain(value[key], f"{field}.{key}") for key in keys}
    if isinstance(value, list | tuple):
        return [_check_plain(item, f"{field}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, str):
        return _check_text(value, field)
    raise RequestError(f"{field} must be made of JSON values, got {type(value).__name__}", field)


def _check_message(message: object, field: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"{field} must be an object with 'role' and 'content', got {type(message).__name__}", field)
    for key in ("role", "content"):
        if key not in message:
            raise RequestError(f"{field}.{key} is missing; a message is {{'role': ..., 'content': ...}}", field)
        _check_text(message[key], f"{field}.{key}")
    if message["role"] not in ROLES:
        raise RequestError(f"{field}.role is {message['role']!r}; expected one of {', '.join(ROLES)}", f"{field}.role")
    plain: dict[str, Any] = _check_plain(message, field)
    return plain


def check_messages(messages: object) -> list[dict[str, Any]]:
    """Return a conversation as plain dicts; a RequestError names the field that is wrong."""
    if not isinstance(messages, list | tuple):
        raise RequestError(f"messages must be a list, got {type(messages).__name__}", "messages")
    if not messages:
        raise RequestError("messages is empty; send at least one {'role': 'user', 'content': ...}", "messages")
    return [_check_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def check_stop_strings(stop_strings: object) -> tuple[str, ...]:
    """Return the stop strings as a tuple; a RequestError names the one that is wrong."""
    if not isinstance(stop_strings, list | tuple):
        raise RequestError(f"stop must be a list of strings, got {type(stop_strings).__name__}", "stop")
    if len(stop_strings) > MAX_STOP_STRINGS:
        raise RequestError(f"stop holds {len(stop_strings)} strings; at most {MAX_STOP_STRINGS} are allowed", "stop")
    for i, stop in enumerate(stop_strings):
        size = len(_check_text(stop, f"stop[{i}]"))
        if not 1 <= size <= MAX_STOP_CHARS:
            raise RequestError(f"stop[{i}] has {size} characters; it must have 1 to {MAX_STOP_CHARS}", f"stop[{i}]")
    return tuple(stop_strings)


def _decoder_steps(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    if tokenizer.decoder is None:
        return []
    pending, steps = [json.loads(tokenizer.decoder.__getstate__())], []
    while pending:
        step = pending.pop(0)
        if step["type"] == "Sequence":
            pending = step["decoders"] + pending
        else:
            steps.append(step)
    return steps


def _byte_of_char() -> dict[str, int]:
    """The alphabet of byte-level BPE: printable Latin-1 stands for itself, the rest starts at U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


class _Pieces:
    """The bytes each token adds to a text, worked out on first use.

    Byte-level tokens spell bytes. Elsewhere the decoder is asked: a piece is what the token adds after a
    plain token (or alone, at the start, where a leading space may be dropped); byte-fallback tokens above
    ASCII are their byte.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._hidden = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        self._cache: dict[tuple[int, bool], bytes | None] = {}
        steps = _decoder_steps(tokenizer)
        kinds = {step["type"] for step in steps}
        self.byte_level = "ByteLevel" in kinds
        self._byte_fallback = "ByteFallback" in kinds
        allowed = {"ByteLevel", "Fuse"} if self.byte_level else _TOKENWISE_STEPS
        strips_end = any(step["type"] == "Strip" and step["stop"] for step in steps)
        if strips_end or not kinds <= allowed:
            raise BundleError(
                f"the tokenizer's decoder {sorted(kinds)} cannot be streamed: a token's text depends on its "
                "neighbours; byte-level and SentencePiece-style decoders can"
            )
        self._chars = _byte_of_char() if self.byte_level else {}
        self._before, self._before_text = (0, "") if self.byte_level else self._find_plain_token()

    def get(self, token_id: int, *, first: bool) -> bytes | None:
        """The token's bytes, `first`: nothing visible came before; None for a special or unknown token."""
        key = (token_id, first)
        if key not in self._cache:
            self._cache[key] = self._work_out(token_id, first)
        return self._cache[key]

    def _work_out(self, token_id: int, first: bool) -> bytes | None:
        if token_id < 0:
            raise RequestError(f"token id {token_id} is negative")
        token = self._tokenizer.id_to_token(token_id)
        if token is None or token_id in self._hidden:
            return None
        if self.byte_level:
            spelled = [self._chars.get(char) for char in token]
            return token.encode() if None in spelled else bytes(byte for byte in spelled if byte is not None)
        byte = _BYTE_TOKEN.fullmatch(token) if self._byte_fallback else None
        if byte and int(byte[1], 16) >= 0x80:
            return bytes.fromhex(byte[1])
        return self._ask_decoder(token_id, first).encode()

    def _ask_decoder(self, token_id: int, first: bool) -> str:
        if first:
            return self._tokenizer.decode([token_id])
        text = self._tokenizer.decode([self._before, token_id])
        if not text.startswith(self._before_text):
            raise BundleError(f"the tokenizer's decoder changes earlier text at token id {token_id}")
        return text.removeprefix(self._before_text)

    def _find_plain_token(self) -> tuple[int, str]:
        """A token that shows as ordinary text, to put before another one."""
        for token_id in range(self._tokenizer.get_vocab_size()):
            text = "" if token_id in self._hidden else self._tokenizer.decode([token_id])
            if text.isascii() and text.isalnum():
                return token_id, text
        raise BundleError("the tokenizer has no token that decodes to a plain letter or digit")


class TextCodec:
    """The tokenizer and chat template of one bundle. Safe to share between requests."""

    def __init__(self, tokenizer: Tokenizer, config: TextConfig) -> None:
        # A tokenizer file may carry training-time truncation and padding; neither belongs to a prompt.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.config = config
        self.stop_token_ids = config.stop_token_ids
        self.pieces = _Pieces(tokenizer)
        self._tokenizer = tokenizer
        self._prefix = self._missing_bos()
        self._template = _compile_template(config.chat_template) if config.chat_template is not None else None

    @classmethod
    def open(cls, folder: Path) -> TextCodec:
        """Read `tokenizer.json` and `text.json` of `folder`."""
        config = _read_text_config(folder / TEXT_FILE)
        path = folder / TOKENIZER_FILE
        if not path.is_file():
            raise BundleError(f"{path} is missing; export the bundle again")
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as err:  # the Rust side raises a bare Exception
            raise BundleError(f"{path} is not a tokenizer this version of tokenizers can read: {err}") from err
        if tokenizer.get_vocab_size() != config.vocab_size:
            raise BundleError(
                f"{path} holds {tokenizer.get_vocab_size()} tokens but {TEXT_FILE} says {config.vocab_size}: "
                "the two files are not of one export"
            )
        return cls(tokenizer, config)

    def _missing_bos(self) -> list[int]:
        """BOS where `add_bos` asks for it and the tokenizer's own post-processor does not add it."""
        if not self.config.add_bos:
            return []
        bos = None if self.config.bos_token is None else self._tokenizer.token_to_id(self.config.bos_token)
        if bos is None:
            raise BundleError(f"{TEXT_FILE} asks for BOS but its bos_token {self.config.bos_token!r} is no token")
        return [] if self._tokenizer.encode("").ids[:1] == [bos] else [bos]

    def encode(self, text: str) -> list[int]:
        """Token ids of a raw completion prompt, with BOS where the tokenizer adds one."""
        return self._prefix + self._tokenizer.encode(_check_text(text, "the prompt")).ids

    def render_chat(self, messages: Sequence[Mapping[str, Any]], /, **template_args: Any) -> str:
        """The conversation as the model's template writes it, ending where the assistant is to speak."""
        plain = check_messages(messages)
        arguments: dict[str, Any] = {"tools": None, "documents": None, "add_generation_prompt": True}
        arguments |= self.config.special_tokens | _check_plain(template_args, "template_args")
        if self._template is None:
            raise RequestError("this model has no chat template; send a raw prompt instead of messages")
        try:
            return self._template.render(arguments | {"messages": plain})
        except Exception as err:  # a template is foreign code: it can raise anything
            raise RequestError(f"the chat template refused the conversation: {err}") from err

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], /, **template_args: Any) -> list[int]:
        """Token ids of a conversation. The template writes BOS itself where the model wants one."""
        rendered = self.render_chat(messages, **template_args)
        return self._tokenizer.encode(rendered, add_special_tokens=False).ids

    def spelling(self, token_id: int) -> str:
        """A token as tokenizer.json spells it, special ones too; empty for an id that is no token."""
        return self._tokenizer.id_to_token(token_id) or ""

    def decode(self, token_ids: Iterable[int]) -> str:
        """Text of `token_ids` without special tokens: exactly what a stream of them emits.

        Differs from `Tokenizer.decode` in one case: in a run of byte-fallback tokens that is not valid UTF-8
        as a whole, the characters that are valid are kept.
        """
        decoder = StreamDecoder(self)
        return decoder.push(token_ids) + decoder.flush()


class StreamDecoder:
    """Text of one request's tokens as they are committed. Holds back at most one unfinished character."""

    def __init__(self, codec: TextCodec) -> None:
        self._pieces = codec.pieces
        self._first = True
        # Bad bytes show as U+FFFD: one per bad sequence in byte-level text, one per byte in byte-fallback
        # text, as the tokenizers library has it.
        self._per_byte = not self._pieces.byte_level
        make = codecs.getincrementaldecoder("utf-8")
        self._utf8 = make("surrogateescape" if self._per_byte else "replace")

    def push(self, token_ids: Iterable[int]) -> str:
        """Return the text that is certain once `token_ids` are committed."""
        data = bytearray()
        for token_id in token_ids:
            piece = self._pieces.get(token_id, first=self._first)
            if piece is not None:
                self._first = False
                data += piece
        return self._text(bytes(data), final=False)

    def flush(self) -> str:
        """Return what an unfinished character at the end of the tokens shows as."""
        return self._text(b"", final=True)

    def _text(self, data: bytes, *, final: bool) -> str:
        text = self._utf8.decode(data, final)
        return _ESCAPED_BYTE.sub("\ufffd", text) if self._per_byte else text


class _StopMatcher:
    """Finds one stop string in a text that arrives in parts (Knuth-Morris-Pratt)."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0  # characters at the end of the text so far that begin the stop string
        self._shorter = [0] * len(stop)  # [n-1]: longest proper prefix of stop[:n] that also ends it
        for end in range(1, len(stop)):
            self._shorter[end] = self._step(self._shorter[end - 1], stop[end])

    def _step(self, matched: int, char: str) -> int:
        while matched and self.stop[matched] != char:
            matched = self._shorter[matched - 1]
        return matched + (self.stop[matched] == char)

    def advance(self, text: str) -> int | None:
        """Read `text`; return how much of it the first match needs, None without a match."""
        for count, char in enumerate(text, start=1):
            self.matched = self._step(self.matched, char)
            if self.matched == len(self.stop):
                return count
        return None


class TextStep(NamedTuple):
    """What one push gave: text to emit, how many of the pushed tokens count, whether generation is over."""

    text: str
    num_kept: int
    finished: bool


class TextStream:
    """Decodes and stops one request. Blocks of committed tokens in, text that will not change out.

    A stop token is kept as a token and adds no text. A stop string and what follows is left out of the text;
    tokens are kept up to the one that completes it. Tokens are judged one by one, so blocks do not matter;
    where one token completes several stop strings, the one that starts first wins. `stopped_by` is the token
    id or string that ended the stream, None while it runs or when `flush` ended it.
    """

    def __init__(
        self,
        codec: TextCodec,
        *,
        stop_strings: Sequence[str] = (),
        stop_token_ids: Sequence[int] | None = None,
        ignore_eos: bool = False,
    ) -> None:
        """stop_token_ids: the model's own by default. ignore_eos: disables them, but no stop string."""
        model_stops = codec.stop_token_ids if stop_token_ids is None else stop_token_ids
        self._stop_ids = frozenset() if ignore_eos else frozenset(model_stops)
        self._matchers = [_StopMatcher(stop) for stop in check_stop_strings(stop_strings)]
        self._decoder = StreamDecoder(codec)
        self._held = ""  # may yet turn out to begin a stop string
        self.finished = False
        self.stopped_by: int | str | None = None

    def push(self, token_ids: Sequence[int]) -> TextStep:
        """Take the next committed tokens; once finished, further ones are dropped."""
        parts: list[str] = []
        num_kept = 0
        for token_id in token_ids:
            if self.finished:
                break
            num_kept += 1
            if token_id in self._stop_ids:
                parts.append(self.flush())
                self.stopped_by = self.stopped_by or int(token_id)
            else:
                parts.append(self._scan(self._decoder.push((token_id,))))
        return TextStep("".join(parts), num_kept, self.finished)

    def flush(self) -> str:
        """End the stream and return the text that was held back."""
        if self.finished:
            return ""
        text = self._scan(self._decoder.flush())
        self.finished = True
        text, self._held = text + self._held, ""
        return text

    def _scan(self, text: str) -> str:
        """Return what can be emitted once `text` has arrived."""
        window = self._held + text
        starts = []
        for matcher in self._matchers:
            used = matcher.advance(text)
            if used is not None:
                starts.append((len(self._held) + used - len(matcher.stop), matcher.stop))
        if starts:
            cut, self.stopped_by = min(starts)
            self.finished, self._held = True, ""
            return window[:cut]
        held = max((matcher.matched for matcher in self._matchers), default=0)
        cut = len(window) - held
        self._held = window[cut:]
        return window[:cut]
