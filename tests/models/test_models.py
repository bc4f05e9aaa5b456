"""Names and shapes against published counts, and against transformers where that is installed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from reshard.errors import ConfigError
from reshard.layouts.piece import TensorSpec
from reshard.models.catalogue import CATALOGUE, find_model
from reshard.models.families import model_from_config
from reshard.models.model import Model
from reshard.models.roles import Role, expert_of, is_input_embedding, layer_of, role_of

# Parameters as published with each model (a tied output head counted once).
PARAMETERS = {
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "qwen3-0.6b": 596_049_920,
    "qwen3-4b": 4_022_468_096,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-32b": 32_762_123_264,
    "qwen3-235b-a22b": 235_093_634_560,
    "deepseek-v3": 671_026_404_352,
}


@pytest.mark.parametrize(("name", "parameters"), PARAMETERS.items())
def test_a_published_model_has_as_many_parameters_as_its_publisher_says(name, parameters):
    assert find_model(name).parameters == parameters
    assert find_model(f"{name}:stacked").parameters == parameters


def test_deepseek_v3_has_as_many_tensors_as_its_checkpoint():
    model = find_model("deepseek-v3")
    assert (model.tensors, len(model.weights), model.layers, model.experts) == (45_337, 45_395, 61, 256)


@pytest.mark.parametrize(
    ("name", "billions"),
    [("nemotron-3-ultra", 550), ("generic-1t", 1000), ("generic-2.4t", 2400), ("generic-2.8t", 2800)],
)
def test_the_other_models_have_about_the_size_in_their_names(name, billions):
    assert find_model(name).parameters / 1e9 == pytest.approx(billions, rel=0.03)


def test_the_usual_way_moves_11_tb_for_a_model_of_2_8t_when_both_stages_are_counted():
    assert 2 * find_model("generic-2.8t").nbytes / 1e12 == pytest.approx(11.2, rel=0.01)


@pytest.mark.parametrize("name", CATALOGUE)
@pytest.mark.parametrize("form", ["", ":stacked"])
def test_every_name_of_the_catalogue_says_what_it_is_for_and_says_it_once(name, form):
    model = find_model(name + form)
    assert [weight.spec.name for weight in model.weights if weight.role is None] == []
    assert len({spec.name for spec in model.specs}) == len(model.specs)
    again = Model.from_specs(model.name, model.specs)  # by the names alone
    assert again.weights == model.weights
    assert (again.experts, again.layers, again.is_tied) == (model.experts, model.layers, model.is_tied)


def test_stacked_experts_are_the_same_numbers_in_fewer_tensors():
    single, stacked = find_model("qwen3-30b-a3b"), find_model("qwen3-30b-a3b:stacked")
    assert {spec.name: spec.shape for spec in stacked.specs}["model.layers.7.mlp.experts.gate_up_proj"] == (
        128,
        1536,
        2048,
    )
    assert (single.nbytes, single.experts) == (stacked.nbytes, stacked.experts)
    assert len(stacked.specs) == len(single.specs) - 48 * (128 * 3 - 2)


@pytest.mark.parametrize(
    ("name", "share"), [("qwen3-4b", 0.669), ("qwen3-30b-a3b", 0.950), ("nemotron-3-ultra", 0.953)]
)
def test_most_bytes_are_in_feed_forward_projections(name, share):
    assert find_model(name).feed_forward_share == pytest.approx(share, abs=0.0006)


@pytest.mark.parametrize("name", [name for name in CATALOGUE if not name.startswith("generic")])
def test_names_and_shapes_are_those_of_transformers(name):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers", minversion="5.0")
    values = dict(CATALOGUE[name].config)
    config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(config)
    shapes = {
        key.replace("model.", "backbone.", 1) if config.model_type == "nemotron_h" else key: tuple(tensor.shape)
        for key, tensor in theirs.state_dict().items()
        if not (config.tie_word_embeddings and key == "lm_head.weight")
    }
    ours = find_model(f"{name}:stacked")
    assert {spec.name: spec.shape for spec in ours.specs} == shapes
    assert ours.parameters == sum(parameter.numel() for parameter in theirs.parameters())


@pytest.mark.parametrize(
    ("name", "role", "layer", "expert"),
    [
        ("model.embed_tokens.weight", Role.VOCABULARY, None, None),
        ("model.language_model.layers.12.self_attn.k_proj.bias", Role.KEY, 12, None),
        ("model.layers.3.mlp.experts.17.down_proj.weight", Role.EXPERT_COLUMNS, 3, 17),
        ("model.layers.3.mlp.shared_experts.down_proj.weight", Role.FFN_COLUMNS, 3, None),
        ("model.layers.3.mlp.shared_expert_gate.weight", Role.WHOLE, 3, None),
        ("model.layers.3.block_sparse_moe.experts.1.w2.weight", Role.EXPERT_COLUMNS, 3, 1),
        ("backbone.layers.0.norm.weight", Role.WHOLE, 0, None),
        ("backbone.layers.0.mixer.norm.weight", Role.MAMBA_ROWS, 0, None),
        ("model.layers.0.self_attn.q_proj.lora_A.weight", None, 0, None),
    ],
)
def test_a_name_says_what_a_tensor_is_for(name, role, layer, expert):
    assert (role_of(name), layer_of(name), expert_of(name)) == (role, layer, expert)


def test_only_the_table_of_tokens_is_an_input_embedding():
    named = ["model.embed_tokens.weight", "backbone.embeddings.weight", "lm_head.weight", "model.norm.weight"]
    assert [is_input_embedding(name) for name in named] == [True, True, False, False]


def test_a_model_of_names_alone_has_no_heads_and_is_tied_if_it_has_no_output_head():
    model = Model.from_specs("m", [TensorSpec("model.embed_tokens.weight", (4, 2), "bfloat16")])
    assert (model.heads, model.is_tied, model.layers, model.experts) == (None, True, 0, 0)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "mamba"}, "no rule gives the names and shapes of a model of the type 'mamba'"),
        ({"model_type": "llama", "vocab_size": 8}, "the config of a 'llama' model must have 'hidden_size'"),
    ],
)
def test_a_config_that_says_too_little_is_refused(config, said):
    with pytest.raises(ConfigError, match=said):
        model_from_config(config)


def test_a_name_that_is_not_there_is_answered_with_the_nearest():
    with pytest.raises(ConfigError, match="Nearest: deepseek-v3; 'reshard models' lists all"):
        find_model("deepseek-v4")


def test_the_catalogue_is_there_without_torch_and_before_anything_is_generated():
    script = "import sys, reshard.models.catalogue, reshard.models.worlds; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "False"
