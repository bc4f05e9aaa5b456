"""A model as the command line names it: one of the catalogue, the headers of safetensors files, or a ``config.json``.

No weight is read. A header is 8 bytes that say its length and then JSON: ``{"name": {"dtype": "BF16", "shape": [8, 8],
...}, ...}``. A JSON file of that form stands for a model too, so that a plan needs no checkpoint; so does a
``config.json`` of a family that is known.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reshard.errors import ConfigError, LayoutError, ManifestError
from reshard.layouts.piece import TensorSpec
from reshard.models.catalogue import CATALOGUE, STACKED, find_model
from reshard.models.families import model_from_config, state_space_of
from reshard.models.model import Heads, Model

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

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


def read_model(text: str) -> Model:
    """The model that a path or a name of the catalogue means; a path counts where there is one.

    The path may be a folder with safetensors files or a ``config.json``, one such file, or a JSON file of names, dtypes
    and shapes.

    Raises:
        ConfigError: Nothing of the kind is there, or the config's family is unknown.
        ManifestError: A file is not of its format, or two files have a tensor of the same name.
    """
    path = Path(text)
    if not path.exists() and (text.removesuffix(STACKED) in CATALOGUE or _is_name(text)):
        return find_model(text)
    beside = (path if path.is_dir() else path.parent) / "config.json"
    config = _config(beside) if beside.is_file() else None
    stands_alone = path.is_dir() and not any(path.glob("*.safetensors*"))
    if config is not None and "model_type" in config and (stands_alone or path == beside):
        return model_from_config(config, name=text)
    specs: dict[str, TensorSpec] = {}
    for file in _files(path):
        for spec in _read_file(file):
            if spec.name in specs:
                raise ManifestError(f"{spec.name!r} is in {file.name} and in another file of {path}; a name is unique.")
            specs[spec.name] = spec
    if not specs:
        raise ManifestError(f"{path} holds no tensor.")
    model = Model.from_specs(text, specs.values())
    return model if config is None else _with_config(model, config, beside)


def _is_name(text: str) -> bool:
    """Whether a text that is no path looks like a name of the catalogue: no separator, no file's ending."""
    return "/" not in text and not text.endswith((".json", ".safetensors"))


def _with_config(model: Model, config: Mapping[str, Any], path: Path) -> Model:
    facts = config.get("text_config", config)
    try:
        query = facts.get("num_attention_heads")
        heads = None if query is None else Heads(int(query), int(facts.get("num_key_value_heads") or query))
        is_tied = bool(facts.get("tie_word_embeddings", model.is_tied))
        return replace(model, heads=heads, state_space=state_space_of(facts), is_tied=is_tied)
    except (ValueError, TypeError, AttributeError) as error:
        raise ManifestError(f"{path} is not a readable config: {error}.") from error


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
            f"--model {path}: there is no safetensors file. Give a folder with some or with a config.json, one file, a "
            f'JSON file {{"name": {{"dtype": "BF16", "shape": [8, 8]}}}}, or a name that \'reshard models\' lists.'
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
            f'{path} is not a list of tensors of the form {{"name": {{"dtype": "BF16", "shape": [8, 8]}}}}: {error}.'
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
        raise ManifestError(
            f"{name!r} in {path}: {shape!r} is not a shape. Sizes are whole numbers, 0 or more.", tensor=name
        )
    try:
        return TensorSpec(name, tuple(shape), _DTYPES.get(str(dtype), str(dtype)))
    except LayoutError as error:
        raise ManifestError(f"{name!r} in {path}: {error.message}", tensor=name) from error


def _config(path: Path) -> Mapping[str, Any]:
    try:
        config = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ManifestError(f"{path} is not a readable config: {error}.") from error
    if not isinstance(config, dict):
        raise ManifestError(f"{path} is not a readable config: it is no object.")
    return config
