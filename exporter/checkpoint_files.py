"""Where a checkpoint lives: local paths, the Hugging Face hub, JSON files, digests. No tensors here."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from xpress_export.errors import CheckpointError

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+(@[\w./-]+)?")
HUB_PATTERNS = ["*.json", "model*.safetensors", "*.jinja", "tokenizer*", "*.model", "*.txt"]
DRAFTER_MARKS = ("DFlash", "DSpark", "XPress", "Speculator")  # in `architectures`

Json = dict[str, Any]


def one_line(error: BaseException) -> str:
    """A foreign exception as a short clause that fits inside one of our sentences."""
    text = " ".join(str(error).split()) or type(error).__name__
    return (text[:197] + "...") if len(text) > 200 else text.rstrip(".")


def resolve_source(source: str) -> Path:
    """The local file or folder `source` names: an existing path, else a hub id `owner/name[@revision]`."""
    path = Path(source).expanduser()
    if path.exists():
        return path
    if HUB_ID.fullmatch(source):
        return _download(source)
    raise CheckpointError(
        f"{source} does not exist; give a local folder, a .gguf or .pt file, or a Hugging Face id owner/name"
    )


def _download(source: str) -> Path:
    import huggingface_hub

    repo, _, revision = source.partition("@")
    try:
        return Path(huggingface_hub.snapshot_download(repo, revision=revision or None, allow_patterns=HUB_PATTERNS))
    except Exception as err:  # the hub client raises errors of many unrelated classes
        raise CheckpointError(
            f"{source} is not a local path and could not be downloaded from the Hugging Face hub "
            f"({type(err).__name__}: {one_line(err)}); check the spelling, the network and your access, "
            f"or pass the path of a local copy"
        ) from err


def read_json(path: Path) -> Json:
    """The JSON object stored in `path`."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as err:
        raise CheckpointError(f"{path.parent} has no {path.name}; give a complete checkpoint folder") from err
    except (OSError, ValueError, RecursionError) as err:
        raise CheckpointError(
            f"{path} is not readable JSON ({one_line(err)}); download or copy the checkpoint again"
        ) from err
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} should hold a JSON object, got {type(value).__name__}; replace it")
    return value


def optional_json(path: Path) -> Json:
    """As `read_json`, but an absent file is an empty object."""
    return read_json(path) if path.is_file() else {}


def require(raw: Json, key: str, where: str) -> Any:
    """`raw[key]`, which has no safe default."""
    if raw.get(key) is None:
        raise CheckpointError(f"{where} has no '{key}', which has no safe default; add it to the file")
    return raw[key]


def integer(value: Any, key: str, where: str, minimum: int = 1) -> int:
    """`value` checked to be a true integer of at least `minimum`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise CheckpointError(
            f"{where}: '{key}' should be an integer of at least {minimum}, got {value!r}; correct the file"
        )
    return value


def table(raw: Json, key: str, where: str) -> Json:
    """The object `raw[key]`, empty where it is absent."""
    value = raw.get(key)
    if value is not None and not isinstance(value, dict):
        raise CheckpointError(f"{where}: '{key}' should be an object, got {value!r}; correct the file")
    return value or {}


def describes_drafter(raw: Json) -> bool:
    """Whether a config dictionary is that of a drafter (or of a drafter with a refiner head)."""
    names = [str(name) for name in raw.get("architectures") or []]
    if any(mark in name for name in names for mark in DRAFTER_MARKS):
        return True
    return bool({"dflash_config", "speculators_model_type", "target_layer_ids"} & raw.keys())


def digest_files(files: Iterable[Path]) -> str:
    """Sha256 over the contents of `files`, ordered by file name; where they lie does not matter."""
    total = hashlib.sha256()
    for path in sorted(files, key=lambda path: path.name):
        with path.open("rb") as stream:
            total.update(hashlib.file_digest(stream, "sha256").digest())
    return total.hexdigest()


def weight_files(folder: Path) -> tuple[Path, ...]:
    """The safetensors files of `folder`: `model.safetensors`, else the index and the shards it names."""
    single = folder / "model.safetensors"
    index = folder / "model.safetensors.index.json"
    if single.is_file():
        return (single,)
    if index.is_file():
        return (index, *(folder / name for name in sorted(set(shard_map(index).values()))))
    found = sorted(path.name for path in folder.iterdir() if path.suffix in {".bin", ".safetensors", ".pth"})
    raise CheckpointError(
        f"{folder} has neither model.safetensors nor model.safetensors.index.json "
        f"(found {', '.join(found[:3]) or 'no weight file'}); save the weights as model.safetensors"
    )


def shard_map(index: Path) -> dict[str, str]:
    """Tensor name to shard file name, from a safetensors index; names that leave the folder are refused."""
    table = read_json(index).get("weight_map")
    if not isinstance(table, dict) or not table:
        raise CheckpointError(f"{index} has no 'weight_map' table; download or copy the checkpoint again")
    for name, shard in table.items():
        if not isinstance(shard, str) or not _stays_inside(shard):
            raise CheckpointError(
                f"{index} places tensor {name} in {shard!r}, which is not a file of the checkpoint folder; "
                f"do not use this checkpoint"
            )
    return table


def _stays_inside(shard: str) -> bool:
    parts = Path(shard.replace("\\", "/")).parts
    return bool(parts) and not Path(shard).is_absolute() and ".." not in parts and parts[0] != "/"
