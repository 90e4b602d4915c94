"""The text side of a bundle: `tokenizer.json` and `text.json`, and the proof that a trio shares them.

    source                                     read with
    folder with tokenizer.json                 transformers' AutoTokenizer
    folder with vocab.json or tokenizer.model  the same, converting
    model.gguf                                 the vocabulary, merges and chat template in its metadata

`text.json` holds the chat template, the special tokens a template may name, every id that ends a generation,
whether a raw prompt starts with BOS, and the number of tokens.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, pre_tokenizers

from xpress_export.errors import CheckpointError
from xpress_export.exporter.checkpoint_files import integer, one_line, optional_json

TOKENIZER_FILE = "tokenizer.json"
TEXT_FILE = "text.json"
TOKENIZER_FILES = (TOKENIZER_FILE, "tokenizer.model", "vocab.json", "spiece.model", "tiktoken.model")
SPECIAL_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")

# Tokens that end a turn. Models whose template uses one often list only their document-end token as EOS.
END_OF_TURN = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eot|>",
    "<|end_of_turn|>",
    "<end_of_turn>",
    "<|endofturn|>",
    "<turn|>",
)
# GGUF pre-tokenizers that cut every digit off before the GPT-2 split; transformers reads them as plain GPT-2,
# which turns "  7" into other tokens than the model was trained on.
GGUF_SINGLE_DIGIT = ("smollm", "starcoder", "refact", "codeshell", "command-r", "exaone", "minerva-7b")
PROBE_TEXT = "Hello, world!  It's 2024:\n\n    def f(x):\treturn x  # naïve 文字 😀"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TokenizerInfo:
    """An exported tokenizer. `folder` holds its two files; `fingerprint` is `tokenizer_fingerprint`'s."""

    folder: Path
    fingerprint: str
    vocab_size: int
    stop_token_ids: tuple[int, ...]
    add_bos: bool
    has_chat_template: bool


def export_tokenizer(source: Path, out_dir: Path, *, stop_token_ids: tuple[int, ...]) -> TokenizerInfo:
    """Write `tokenizer.json` and `text.json` of the model at `source` into `out_dir`.

    source: a model folder or a `.gguf` file. stop_token_ids: the EOS ids of the model's own config.
    """
    loaded = _load(source)
    backend = _plain_backend(loaded)
    if (source / TOKENIZER_FILE).is_file():
        _warn_if_unlike(backend, source)
    template = _default_template(loaded.chat_template, source)
    stops = _stop_set(loaded, backend, template, source, stop_token_ids)
    text: dict[str, Any] = {"chat_template": template}
    text |= {name: getattr(loaded, name) for name in SPECIAL_NAMES}
    text |= {"stop_token_ids": stops, "add_bos": _adds_bos(loaded, backend)}
    text["vocab_size"] = backend.get_vocab_size()
    out_dir.mkdir(parents=True, exist_ok=True)
    _write(out_dir / TOKENIZER_FILE, backend.to_str(pretty=True))
    _write(out_dir / TEXT_FILE, json.dumps(text, ensure_ascii=False, indent=2) + "\n")
    return TokenizerInfo(
        folder=out_dir,
        fingerprint=_digest(_rows(backend)),
        vocab_size=text["vocab_size"],
        stop_token_ids=tuple(stops),
        add_bos=text["add_bos"],
        has_chat_template=template is not None,
    )


def tokenizer_fingerprint(tokenizer_json: Path) -> str:
    """Sha256 over what gives token ids their meaning: vocabulary, merges (or scores) and added tokens."""
    return _digest(_rows(_open(tokenizer_json)))


def check_same_tokenizer(target_info: TokenizerInfo, folder: Path, role: str) -> str:
    """Compare the tokenizer that a drafter or refiner folder ships with the target's.

    Returns "identical", or "absent" where the folder ships none; a CheckpointError names what differs first.
    """
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        return "absent"
    theirs = _rows(_plain_backend(_load(folder)))
    if _digest(theirs) == target_info.fingerprint:
        return "identical"
    ours = _rows(_open(target_info.folder / TOKENIZER_FILE))
    label = next(label for label in {**ours, **theirs} if ours.get(label) != theirs.get(label))
    raise CheckpointError(
        f"the tokenizer of the {role} in {folder} is not the target's: {label} is {_show(ours, label)} in "
        f"the target and {_show(theirs, label)} in the {role}; use a {role} trained for this target"
    )


def _show(rows: dict[str, Any], label: str) -> str:
    return repr(rows[label]) if label in rows else "absent"


def _rows(tokenizer: Tokenizer) -> dict[str, Any]:
    """The tokenizer as labelled facts, in an order fit for reporting the first difference.

    Rows that a GGUF file adds only to fill the model's embedding (`[PAD151669]`) are no tokens and left out.
    """
    spec = json.loads(tokenizer.to_str())
    vocab = sorted((i, token) for token, i in tokenizer.get_vocab(with_added_tokens=True).items())
    rows: dict[str, Any] = {f"token {i}": token for i, token in vocab if token != f"[PAD{i}]"}
    if isinstance(spec["model"]["vocab"], list):  # Unigram: (token, score)
        rows |= {f"score of token {i}": score for i, (_, score) in enumerate(spec["model"]["vocab"])}
    rows |= {f"merge {n}": pair for n, pair in enumerate(spec["model"].get("merges", ()))}
    rows |= {f"added token {token['id']}": token["content"] for token in spec["added_tokens"]}
    return rows


def _digest(rows: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def _open(path: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(path))
    except Exception as err:  # the Rust side raises a bare Exception
        raise CheckpointError(f"{path} cannot be read as a tokenizer: {one_line(err)}") from err


def _load(source: Path) -> Any:
    """The tokenizer at `source` as a transformers object with a `tokenizers` backend."""
    if source.suffix == ".gguf" and source.is_file():
        return _load_gguf(source)
    if not source.is_dir():
        raise CheckpointError(f"{source} is neither a model folder nor a .gguf file")
    from transformers import AutoTokenizer

    loaded = _convert(AutoTokenizer, source, "")
    if not getattr(loaded, "is_fast", False):
        raise CheckpointError(
            f"{source} has a tokenizer that transformers cannot express as {TOKENIZER_FILE}; add that file"
        )
    return loaded


def _load_gguf(path: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    from xpress_export.exporter.weights import GgufFile

    loaded = _convert(PreTrainedTokenizerFast, path.parent, path.name)
    if GgufFile(path).value("tokenizer.ggml.pre") in GGUF_SINGLE_DIGIT:
        loaded.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False),
            ]
        )
    return loaded


def _convert(factory: Any, folder: Path, gguf_file: str) -> Any:
    options = {"gguf_file": gguf_file} if gguf_file else {}
    try:
        return factory.from_pretrained(folder, local_files_only=True, **options)
    except Exception as err:  # transformers raises errors of many unrelated classes
        raise CheckpointError(
            f"{folder / gguf_file} has no tokenizer that transformers can read ({one_line(err)}); "
            f"a model folder needs {TOKENIZER_FILE}"
        ) from err


def _warn_if_unlike(backend: Tokenizer, folder: Path) -> None:
    """Tell when transformers rebuilt the tokenizer into one that cuts text unlike the folder's own file."""
    own = _open(folder / TOKENIZER_FILE).encode(PROBE_TEXT, add_special_tokens=False).ids
    rebuilt = backend.encode(PROBE_TEXT, add_special_tokens=False).ids
    if own != rebuilt:
        logger.warning(
            "the tokenizer.json of %s cuts %r into %s but transformers makes %s of it; the bundle follows transformers",
            folder,
            PROBE_TEXT,
            own,
            rebuilt,
        )


def _plain_backend(loaded: Any) -> Tokenizer:
    """A copy of the backend without the truncation and padding that training may have left in it."""
    backend = Tokenizer.from_str(loaded.backend_tokenizer.to_str())
    backend.no_truncation()
    backend.no_padding()
    return backend


def _default_template(template: Any, source: Path) -> str | None:
    """A model may ship several named templates; the one called "default" is for chat."""
    if not isinstance(template, dict):
        return None if template is None else str(template)
    if "default" not in template:
        raise CheckpointError(
            f"{source} has chat templates {sorted(template)} but none called 'default'; keep the one to use"
        )
    return str(template["default"])


def _adds_bos(loaded: Any, backend: Tokenizer) -> bool:
    return loaded.bos_token is not None and backend.encode("").ids[:1] == [loaded.bos_token_id]


def _stop_set(
    loaded: Any, backend: Tokenizer, template: str | None, source: Path, model_stops: tuple[int, ...]
) -> list[int]:
    """Every id that ends a generation: what the configs list, the tokenizer's EOS, and the turn's end."""
    stops = {integer(i, "stop_token_ids", "the model's config", minimum=0) for i in model_stops}
    stops |= _generation_stops(source)
    if loaded.eos_token is not None:
        stops.add(loaded.eos_token_id)
    turn_ends = [token for token in END_OF_TURN if template is not None and token in template]
    stops |= {i for i in map(backend.token_to_id, turn_ends) if i is not None}
    return sorted(stops)


def _generation_stops(source: Path) -> set[int]:
    path = source / "generation_config.json"
    found = optional_json(path).get("eos_token_id") if source.is_dir() else None
    ids = found if isinstance(found, list) else [] if found is None else [found]
    return {integer(i, "eos_token_id", str(path), minimum=0) for i in ids}


def _write(path: Path, text: str) -> None:
    """Write all of the file or nothing of it."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)
