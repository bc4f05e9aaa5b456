"""Names and shapes of a model's tensors, from the headers of its safetensors files; no weight is read.

A header is 8 bytes that say its length and then JSON: ``{"name": {"dtype": "BF16", "shape": [8, 8], ...}, ...}``. A
JSON file of that form stands for a model too, so that a plan needs no checkpoint.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from reshard.errors import ConfigError, LayoutError, ManifestError
from reshard.layouts.piece import TensorSpec

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

_MOST_HEADER_NBYTES = 100_000_000  # the format's own limit
_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
}


@dataclass(frozen=True, slots=True)
class Heads:
    """How many query and KV heads a layer has."""

    query: int
    kv: int


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The tensors of a model, and its heads where a ``config.json`` lies beside them."""

    tensors: tuple[TensorSpec, ...]
    heads: Heads | None


def read_model(path: Path) -> ModelFiles:
    """Read a folder with safetensors files, one such file, or a JSON file of names, dtypes and shapes.

    Raises:
        ConfigError: Nothing of the kind is there.
        ManifestError: A file is not of its format, or two files have a tensor of the same name.
    """
    specs: dict[str, TensorSpec] = {}
    for file in _files(path):
        for spec in _read_file(file):
            if spec.name in specs:
                raise ManifestError(f"{spec.name!r} is in {file.name} and in another file of {path}; a name is unique.")
            specs[spec.name] = spec
    if not specs:
        raise ManifestError(f"{path} holds no tensor.")
    return ModelFiles(tuple(specs.values()), _heads((path if path.is_dir() else path.parent) / "config.json"))


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    index = path / "model.safetensors.index.json"
    if index.is_file():
        try:
            return [path / name for name in sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ManifestError(f"{index} has no readable weight_map: {error!r}.") from error
    found = sorted(path.glob("*.safetensors")) if path.is_dir() else []
    if not found:
        raise ConfigError(
            f"--model {path}: there is no safetensors file. Give a folder with some, one file, or a JSON file "
            f'{{"name": {{"dtype": "BF16", "shape": [8, 8]}}}}.'
        )
    return found


def _read_file(path: Path) -> Iterator[TensorSpec]:
    try:
        header = json.loads(path.read_bytes() if path.suffix == ".json" else _header(path))
        rows = [(name, row["dtype"], row["shape"]) for name, row in header.items() if name != "__metadata__"]
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ManifestError(
            f'{path} is not a list of tensors of the form {{"name": {{"dtype": "BF16", "shape": [8, 8]}}}}: {error!r}.'
        ) from error
    for name, dtype, shape in rows:
        yield _spec(path, name, dtype, shape)


def _header(path: Path) -> bytes:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > min(_MOST_HEADER_NBYTES, path.stat().st_size - 8):
            raise ValueError(f"a header of {length} bytes in a file of {path.stat().st_size}")
        return file.read(length)


def _spec(path: Path, name: str, dtype: object, shape: Any) -> TensorSpec:
    if not isinstance(shape, list) or not all(isinstance(n, int) and n >= 0 for n in shape):
        raise ManifestError(f"{name!r} in {path}: {shape!r} is not a shape.", tensor=name)
    try:
        return TensorSpec(name, tuple(shape), _DTYPES.get(str(dtype), str(dtype)))
    except LayoutError as error:
        raise ManifestError(f"{name!r} in {path}: {error.message}", tensor=name) from error


def _heads(config: Path) -> Heads | None:
    if not config.is_file():
        return None
    try:
        facts: Mapping[str, Any] = json.loads(config.read_text("utf-8"))
        facts = facts.get("text_config", facts)
        query = facts.get("num_attention_heads")
        return None if query is None else Heads(int(query), int(facts.get("num_key_value_heads") or query))
    except (ValueError, TypeError, AttributeError) as error:
        raise ManifestError(f"{config} is not a readable config: {error!r}.") from error
