from __future__ import annotations

import json
import shlex
import struct

import click
import pytest
from click.testing import CliRunner

from reshard import Layout, Manifest, Mesh, Plan, plan_refit
from reshard.cli.main import main
from reshard.cli.shorthand import WorldText

ROWS_TO_COLUMNS = ("--shape", "8x8", "--source", "fsdp=2 [fsdp, -]", "--destination", "tp=4 [-, tp]")


def run(*args, stdin=None):
    return CliRunner().invoke(main, ["plan", *map(str, args)], input=stdin)


def plan_of(*args):
    result = run(*args, "-o", "-")
    assert result.exit_code == 0, result.output
    return Plan.from_json(json.loads(result.stdout))


def boxes_of(plan, side, rank):
    manifest = plan.src if side == "source" else plan.dst[0]
    (entry,) = manifest.entries
    return [str(box) for holding in entry.holdings for box, ranks in holding.boxes(entry.spec) if rank in ranks]


def write(folder, name, value):
    path = folder / name
    path.write_text(json.dumps(value), "utf-8")
    return path


@pytest.mark.parametrize("verb", ["plan", "explain", "check"])
def test_the_example_in_the_help_runs(verb, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert run(*ROWS_TO_COLUMNS, "-o", "plan.json").exit_code == 0
    epilog = main.get_command(click.Context(main), verb).epilog
    command = shlex.split(epilog.removeprefix("Example: "))
    assert command[:2] == ["reshard", verb]
    result = CliRunner().invoke(main, command[1:])
    assert result.exit_code == 0, result.output
    assert result.stdout


# -- what is printed and written -----------------------------------------------------------------------------------


def test_the_answer_is_on_stdout_and_the_time_it_took_on_stderr():
    result = run(*ROWS_TO_COLUMNS)
    assert "on the wire 128 B over 8 pairs" in result.stdout
    assert "8 messages of up to 3 MiB in 4 rounds (no order needs fewer than 4)" in result.stdout
    assert "proven: " in result.stdout
    assert result.stderr.startswith("planned and proved in ")


def test_all_strategies_are_compared_and_the_usual_way_sends_the_whole_tensor_to_everyone():
    result = run(*ROWS_TO_COLUMNS, "--strategy", "all", "--json")
    rows = {row["strategy"]: row for row in json.loads(result.stdout)["strategies"]}
    assert {name: row["wire_nbytes"] for name, row in rows.items()} == {
        "reshard": 128,
        "point-to-point": 128,
        "gather-broadcast": 4 * 128,
    }
    assert rows["reshard"]["busiest_sender"] == {"rank": "rank 0", "nbytes": 64}
    assert rows["gather-broadcast"]["busiest_receiver"] == {"rank": "rank 2", "nbytes": 128}
    table = run(*ROWS_TO_COLUMNS, "--strategy", "all").stdout
    assert table.splitlines()[1].split("  ")[0] == "on the wire"
    assert max(map(len, table.splitlines())) <= 80


def test_json_says_digest_proof_totals_and_how_long_it_took():
    answer = json.loads(run(*ROWS_TO_COLUMNS, "--json").stdout)
    assert answer["digest"] == plan_of(*ROWS_TO_COLUMNS).digest
    assert answer["proof"]["passed"] is True
    assert answer["proof"]["delivered_nbytes"] == answer["proof"]["needed_nbytes"] == 128
    (totals,) = answer["strategies"]
    assert (totals["messages"], totals["rounds"], totals["least_rounds"]) == (8, 4, 4)
    assert 0 < answer["plan_seconds"] < 60


def test_equal_questions_have_equal_answers_byte_for_byte(tmp_path):
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    answers = [run(*ROWS_TO_COLUMNS, "-o", path) for path in (first, second)]
    assert answers[0].stdout == answers[1].stdout
    assert first.read_bytes() == second.read_bytes()
    as_json = [json.loads(run(*ROWS_TO_COLUMNS, "--json").stdout) for _ in range(2)]
    for answer in as_json:
        del answer["plan_seconds"], answer["order_seconds"]  # the numbers that are measured
    assert as_json[0] == as_json[1]


def test_a_plan_on_stdout_stands_there_alone_and_can_be_read_from_stdin():
    written = run(*ROWS_TO_COLUMNS, "-o", "-")
    assert Plan.from_json(json.loads(written.stdout)).wire_nbytes == 128
    assert "on the wire" in written.stderr
    again = run("--plan", "-", stdin=written.stdout)
    assert again.stdout == run(*ROWS_TO_COLUMNS).stdout


def test_a_saved_plan_says_a_tensor_and_a_route_a_line(tmp_path):
    saved = tmp_path / "plan.json"
    sides = ("--source", "ep4 pp2", "--destination", "tp2 dp4")
    run("--model", "qwen3-30b-a3b", *sides, "--cluster", "dgx-h100", "-o", saved)
    lines = saved.read_text("utf-8").splitlines()
    assert '{"name": "lm_head.weight", "shape": [151936, 2048], "dtype": "bfloat16", "held": [[[0]]]},' in lines
    assert '["24..47", "0..31", [8]],' in lines  # these experts of these layers
    assert '[0, 0, 905969664, "striped", "0>8+2..6/2"],' in lines
    assert len(lines) < 1000


def test_a_saved_plan_is_planned_again_only_for_another_strategy(tmp_path):
    saved = tmp_path / "plan.json"
    run(*ROWS_TO_COLUMNS, "-o", saved)
    assert run("--plan", saved).stdout == run(*ROWS_TO_COLUMNS).stdout
    other = json.loads(run("--plan", saved, "--strategy", "gather-broadcast", "--json").stdout)
    assert other["strategies"][0]["wire_nbytes"] == 512


def test_a_saved_plan_that_does_not_deliver_is_not_summed_up(tmp_path):
    plan = plan_of(*ROWS_TO_COLUMNS).to_json()
    plan["routes"].pop()
    result = run("--plan", write(tmp_path, "broken.json", plan))
    assert (result.exit_code, result.stdout) == (1, "")
    assert "rank 5 never gets bytes [0, 16)" in result.stderr


def test_staging_is_bounded_by_what_was_given():
    wide = ("--shape", "8192x8192", *ROWS_TO_COLUMNS[2:])
    answer = json.loads(run(*wide, "--staging", "1MiB", "--json").stdout)
    assert 0 < answer["strategies"][0]["staging_nbytes"] <= 2**20


# -- one tensor in words -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world", "rank", "boxes"),
    [
        ("fsdp=2 [fsdp, -]", 1, ["[4:8, 0:8)"]),
        ("fsdp2[fsdp]", 1, ["[4:8, 0:8)"]),  # what is left out is not split
        ("dp=2 tp=2 [-, tp]", 3, ["[0:8, 4:8)"]),  # the last axis varies fastest
        ("dp=2 []", 1, ["[0:8, 0:8)"]),  # copies
        ("a=2 b=2 [a, b]", 2, ["[4:8, 0:4)"]),
        ("fsdp=2 tp=2 [tp+fsdp, -]", 1, ["[4:6, 0:8)"]),  # tp cuts first, though it varies fastest
        ("fsdp=2 [fsdp/2, -]", 1, ["[2:4, 0:8)", "[6:8, 0:8)"]),  # a strided shard is two boxes
    ],
)
def test_a_world_in_words_is_the_layout_that_it_says(world, rank, boxes):
    plan = plan_of("--shape", "8x8", "--source", world, "--destination", "one=1 []")
    assert boxes_of(plan, "source", rank) == boxes


@pytest.mark.parametrize(("rule", "sizes"), [(None, [3, 3, 3, 1]), ("ceil", [3, 3, 3, 1]), ("balanced", [3, 3, 2, 2])])
def test_sizes_that_do_not_divide_are_cut_as_torch_cuts_them_unless_told_otherwise(rule, sizes):
    args = ["--shape", "10", "--source", "tp=4 [tp]", "--destination", "one=1 []"]
    plan = plan_of(*args, *(["--rule", rule] if rule else []))
    entry = plan.src.entries[0]
    layout = entry.holdings[0].layout(entry.spec)
    assert [layout.local_shape(rank)[0] for rank in range(4)] == sizes


def test_the_rule_even_refuses_sizes_that_do_not_divide():
    result = run("--shape", "10", "--source", "tp=4 [tp]", "--destination", "one=1 []", "--rule", "even")
    assert result.exit_code == 2
    assert "needs 10 to be divisible by 4" in result.stderr


@pytest.mark.parametrize(
    ("more", "ranks"),
    [
        ([], [(2, 3), (4, 5, 6)]),  # each world after the one before
        (["--same-ranks"], [(0, 1), (2, 3, 4)]),
    ],
)
def test_destination_ranks_follow_the_sources_unless_they_are_the_same(more, ranks):
    sides = ["--source", "fsdp=2 [fsdp]", "--destination", "tp=2 [tp]", "--destination", "tp=3 [-, tp]"]
    plan = plan_of("--shape", "6x6", *sides, *more)
    assert [manifest.entries[0].holdings[0].ranks for manifest in plan.dst] == ranks


def test_a_world_may_say_where_its_ranks_start():
    plan = plan_of("--shape", "8x8", "--source", "fsdp=2 [fsdp] @3", "--destination", "tp=2 [-, tp] @4")
    assert plan.src.entries[0].holdings[0].ranks == (3, 4)
    assert plan.dst[0].entries[0].holdings[0].ranks == (4, 5)
    assert plan.local_nbytes == 32  # rank 4 is in both worlds: it keeps rows 4 to 7 of columns 0 to 3


def test_a_scalar_is_a_tensor_too():
    answer = run("--shape", "scalar", "--dtype", "float32", "--source", "a=1 []", "--destination", "b=2 []", "--json")
    assert json.loads(answer.stdout)["strategies"][0]["wire_nbytes"] == 8


@pytest.mark.parametrize(
    ("world", "said"),
    [
        ("rows", "'rows' is not an axis with its size"),
        ("", "names no mesh axis"),
        ("tp=2 [tp", "is not a world"),
        ("tp=2 [tp, t p]", "does not say what splits a dim"),
        ("tp=2 [dp]", "names axis 'dp'"),
        ("tp=2 [tp, tp]", "splits more than one dim"),
        ("tp=2 tp=2 [tp]", "every axis needs its own name"),
        ("tp=0 [tp]", "a size of at least 1"),
        ("tp=2 [-, -, tp]", "3 entries for a tensor of 2 dims"),
        ("tp=2", "does not say what its axes split"),
    ],
)
def test_a_world_that_says_nothing_clear_is_a_wrong_question(world, said):
    result = run("--shape", "8x8", "--source", "fsdp=2 [fsdp]", "--destination", world)
    assert (result.exit_code, result.stdout) == (2, "")
    assert said in result.stderr


def test_a_world_remembers_what_was_written():
    assert WorldText.parse("dp=2 tp4 [-, tp] @ 8").mesh(0) == Mesh({"dp": 2, "tp": 4}, range(8, 16))


# -- manifests -----------------------------------------------------------------------------------------------------


def two_manifests(folder, shape=(8, 8)):
    held = Manifest.from_layouts({"w": Layout((8, 8), "bfloat16", Mesh({"fsdp": 2}), ("fsdp",))}, world="trainer")
    wanted = Manifest.from_layouts({"w": Layout(shape, "bfloat16", Mesh({"tp": 4}), (None, "tp"))}, world="engine")
    return write(folder, "held.json", held.to_json()), write(folder, "wanted.json", wanted.to_json())


def test_two_manifests_are_planned_as_in_a_program(tmp_path):
    held, wanted = two_manifests(tmp_path)
    plan = plan_of("--source", held, "--destination", wanted)
    expected = plan_refit(*(Manifest.from_json(json.loads(path.read_text("utf-8"))) for path in (held, wanted)))
    assert plan == expected
    assert plan.rank_name(2) == "engine rank 0"


def test_sides_that_do_not_fit_together_are_a_wrong_question(tmp_path):
    held, wanted = two_manifests(tmp_path, shape=(8, 12))
    result = run("--source", held, "--destination", wanted)
    assert result.exit_code == 2
    assert result.stderr.startswith("ManifestError: 'w': the source's shape is [8, 8], engine's is [8, 12].")


def test_a_manifest_of_one_rank_alone_is_refused(tmp_path):
    _, wanted = two_manifests(tmp_path)
    alone = json.loads(wanted.read_text("utf-8"))
    alone["holdings"] = [{"pieces": [[-1, [[[0, 0], [8, 8]]]]]}]
    result = run("--source", write(tmp_path, "alone.json", alone), "--destination", wanted)
    assert result.exit_code == 2
    assert "whose number it does not say" in result.stderr


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read: No such file"),
        ("{", "is not JSON"),
        ("[]", "is not a manifest"),
        ('{"format": "reshard-manifest-1"}', "it has no 'holdings'"),
        ('{"format": "other"}', "its format is 'other'"),
    ],
)
def test_a_file_that_is_no_manifest_is_a_wrong_question(tmp_path, content, said):
    path = tmp_path / "side.json"
    if content is not None:
        path.write_text(content, "utf-8")
    result = run("--source", path, "--destination", path)
    assert (result.exit_code, result.stdout) == (2, "")
    assert said in result.stderr


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ([], "Give --source and --destination"),
        (["--source", "-"], "Give --source and --destination"),
        (["--source", "-", "--destination", "-"], "Stdin ('-') can be read once"),
        (["--plan", "p", "--shape", "8"], "--plan already says"),
        (["--source", "fsdp=2 [fsdp]", "--destination", "tp=2 [tp]"], "A shorthand needs --shape or --model"),
        (["--source", "ep16 pp4 dp2", "--destination", "tp8"], "A shorthand needs --shape or --model"),
        ([*ROWS_TO_COLUMNS, "--model", "m"], "give one of them"),
        (["--source", "a", "--destination", "b", "--rule", "even"], "--dtype and --rule"),
        (["--source", "a", "--destination", "b", "--same-ranks"], "--same-ranks is for shorthands"),
        ([*ROWS_TO_COLUMNS, "--strategy", "all", "-o", "x"], "--output writes one plan"),
        ([*ROWS_TO_COLUMNS, "--json", "-o", "-"], "both write to stdout"),
        ([*ROWS_TO_COLUMNS, "-o", "no/such/folder/plan.json"], "cannot be written"),
        ([*ROWS_TO_COLUMNS, "--dtype", "float12"], "'float12' is not a dtype"),
        (["--shape", "8,8", *ROWS_TO_COLUMNS[2:]], "'8,8' is not a shape"),
    ],
)
def test_options_that_make_no_question_are_refused(args, said):
    result = run(*args)
    assert (result.exit_code, result.stdout) == (2, "")
    assert said in result.stderr


# -- whole models --------------------------------------------------------------------------------------------------

TENSORS = {
    "model.embed_tokens.weight": [50, 8],
    "model.layers.0.self_attn.q_proj.weight": [16, 8],
    "model.layers.0.self_attn.q_proj.bias": [16],
    "model.layers.0.self_attn.k_proj.weight": [8, 8],
    "model.layers.0.self_attn.v_proj.weight": [8, 8],
    "model.layers.0.self_attn.o_proj.weight": [8, 16],
    "model.layers.0.self_attn.q_norm.weight": [4],
    "model.layers.0.mlp.gate_proj.weight": [12, 8],
    "model.layers.0.mlp.up_proj.weight": [12, 8],
    "model.layers.0.mlp.down_proj.weight": [8, 12],
    "model.layers.0.input_layernorm.weight": [8],
    "model.norm.weight": [8],
    "lm_head.weight": [50, 8],
}
CONFIG = {"num_attention_heads": 4, "num_key_value_heads": 2}


def write_safetensors(path, shapes):
    """A file with a header and no weights: the header alone is read."""
    header = json.dumps(
        {"__metadata__": {"format": "pt"}}
        | {name: {"dtype": "BF16", "shape": shape, "data_offsets": [0, 0]} for name, shape in shapes.items()}
    ).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header)


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    names = list(TENSORS)
    write_safetensors(folder / "model-00001.safetensors", {name: TENSORS[name] for name in names[:5]})
    write_safetensors(folder / "model-00002.safetensors", {name: TENSORS[name] for name in names[5:]})
    write(folder, "config.json", CONFIG)
    return folder


def model_plan(model, source="fsdp8", destination="tp2 dp2"):
    return plan_of("--model", model, "--source", source, "--destination", destination)


@pytest.mark.parametrize(
    ("name", "box"),
    [
        ("model.embed_tokens.weight", "[32:50, 0:8)"),  # an engine fills the vocabulary up to 64 rows
        ("model.layers.0.self_attn.q_proj.weight", "[8:16, 0:8)"),
        ("model.layers.0.self_attn.q_proj.bias", "[8:16)"),
        ("model.layers.0.self_attn.k_proj.weight", "[4:8, 0:8)"),
        ("model.layers.0.self_attn.o_proj.weight", "[0:8, 8:16)"),
        ("model.layers.0.self_attn.q_norm.weight", "[0:4)"),
        ("model.layers.0.mlp.up_proj.weight", "[6:12, 0:8)"),
        ("model.layers.0.mlp.down_proj.weight", "[0:8, 6:12)"),
        ("model.norm.weight", "[0:8)"),
        ("lm_head.weight", "[32:50, 0:8)"),
    ],
)
def test_tp_cuts_a_tensor_by_its_name(model, name, box):
    entry = model_plan(model).dst[0].entry(name)
    held = {rank: box for box, ranks in entry.holdings[0].boxes(entry.spec) for rank in ranks}
    assert (str(held[9]), str(held[11])) == (box, box)  # tp rank 1 of both replicas


def test_fsdp_cuts_dim_0_of_everything_by_the_ceil_rule(model):
    entry = model_plan(model).src.entry("model.embed_tokens.weight")
    assert [str(box) for box, _ in entry.holdings[0].boxes(entry.spec)][-1] == "[49:50, 0:8)"


def test_fsdp_cuts_what_tp_has_left(model):
    entry = model_plan(model, source="fsdp2 tp2").src.entry("model.layers.0.mlp.up_proj.weight")
    held = {rank: str(box) for box, ranks in entry.holdings[0].boxes(entry.spec) for rank in ranks}
    assert held == {0: "[0:3, 0:8)", 1: "[6:9, 0:8)", 2: "[3:6, 0:8)", 3: "[9:12, 0:8)"}


def test_an_engine_gives_a_kv_head_to_several_ranks_where_there_are_more_ranks_than_heads(model):
    entry = model_plan(model, destination="tp4").dst[0].entry("model.layers.0.self_attn.k_proj.weight")
    held = {rank: str(box) for box, ranks in entry.holdings[0].boxes(entry.spec) for rank in ranks}
    assert held == {8: "[0:4, 0:8)", 9: "[0:4, 0:8)", 10: "[4:8, 0:8)", 11: "[4:8, 0:8)"}


@pytest.mark.parametrize(
    ("source", "destination", "said"),
    [
        ("fsdp2 tp4", "tp2", "'model.layers.0.self_attn.k_proj.weight': it has 2 KV heads and tp is 4. FSDP copies no"),
        (
            "megatron tp3",
            "tp2",
            "'model.layers.0.self_attn.q_proj.weight': it has 2 KV heads and tp is 3. Use a tp that",
        ),
        ("fsdp2", "tp8", "'model.layers.0.self_attn.q_proj.weight': it has 4 query heads and tp is 8"),
    ],
)
def test_heads_that_tp_does_not_divide_are_refused_not_split(model, source, destination, said):
    result = run("--model", model, "--source", source, "--destination", destination)
    assert result.exit_code == 2
    assert said in result.stderr


def test_without_a_config_it_is_said_that_heads_are_unknown(model):
    (model / "config.json").unlink()
    result = run("--model", model, "--source", "fsdp2", "--destination", "tp4")
    assert result.exit_code == 0
    assert "wherever their heads begin" in result.stderr


def test_a_name_that_says_nothing_is_refused_where_tp_would_need_it(tmp_path):
    path = write(tmp_path, "names.json", {"model.layers.0.mlp.adapter.weight": {"dtype": "BF16", "shape": [8, 8]}})
    result = run("--model", path, "--source", "fsdp2", "--destination", "tp2")
    assert result.exit_code == 2
    assert "it is not the name of a tensor in a model that is known here" in result.stderr
    assert run("--model", path, "--source", "fsdp2", "--destination", "fsdp3 dp2").exit_code == 0


def test_names_and_shapes_alone_stand_for_a_model(tmp_path, model):
    listed = {name: {"dtype": "bfloat16", "shape": shape} for name, shape in TENSORS.items()}
    write(tmp_path, "config.json", CONFIG)
    assert model_plan(write(tmp_path, "names.json", listed)) == model_plan(model)


def test_an_index_says_which_files_make_the_model(model):
    write_safetensors(model / "adapter.safetensors", {"lora": [4, 4]})
    assert run("--model", model, "--source", "fsdp2", "--destination", "tp2").exit_code == 2  # what is lora?
    files = {"a": "model-00001.safetensors", "b": "model-00002.safetensors"}
    write(model, "model.safetensors.index.json", {"weight_map": files})
    assert len(model_plan(model).specs) == len(TENSORS)


def test_a_real_file_is_read_as_its_writer_wrote_it(tmp_path):
    torch = pytest.importorskip("torch")
    save_file = pytest.importorskip("safetensors.torch").save_file
    save_file(
        {"norm.weight": torch.zeros(4, 2), "lm_head.weight": torch.zeros(3, dtype=torch.int8)},
        tmp_path / "m.safetensors",
    )
    plan = plan_of("--model", tmp_path / "m.safetensors", "--source", "fsdp2", "--destination", "dp2")
    assert [(spec.name, spec.dtype, spec.shape) for spec in plan.specs] == [
        ("lm_head.weight", "int8", (3,)),
        ("norm.weight", "float32", (4, 2)),
    ]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda folder: folder / "absent", "there is no safetensors file"),
        (lambda folder: folder, "there is no safetensors file"),
        (lambda folder: bytes_in(folder / "m.safetensors", b"\xff" * 20), "is not a list of tensors"),
        (lambda folder: bytes_in(folder / "m.safetensors", b""), "is not a list of tensors"),
        (lambda folder: write(folder, "m.json", {"w": {"shape": [4]}}), "is not a list of tensors"),
        (lambda folder: write(folder, "m.json", {"w": {"dtype": "F4", "shape": [4]}}), "'F4' is not a dtype"),
        (lambda folder: write(folder, "m.json", {"w": {"dtype": "F32", "shape": "4"}}), "'4' is not a shape"),
        (lambda folder: write(folder, "m.json", {}), "holds no tensor"),
    ],
)
def test_a_model_that_cannot_be_read_is_a_wrong_question(tmp_path, make, said):
    result = run("--model", make(tmp_path), "--source", "fsdp2", "--destination", "tp2")
    assert (result.exit_code, result.stdout) == (2, "")
    assert said in result.stderr


def bytes_in(path, content):
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("world", "said"),
    [
        ("xp4", "'xp' is not an axis of a model in a vLLM-like engine. Known: dp, pp, tp, ep, etp."),
        ("cp2", "'cp' is not an axis of a model in a vLLM-like engine"),
        ("fdsp2", "Known: dp, pp, tp, ep, etp. Is 'fsdp' meant?"),
        ("ep4", "has no experts, so nothing is spread by ep"),
        ("tp=2 [tp]", "leave the brackets out"),
        ("tp2 tp2", "gives an axis twice"),
        ("vllm megatron tp2", "gives vllm and megatron; give one of them"),
        ("hsdp2 dp2", "hsdp and dp both count copies"),
        ("megatron tp3 ep2", "One must divide the other"),
        ("fsdp4 ep3", "Use an ep that divides them, without tp"),
        ("tp0", "every size must be at least 1"),
    ],
)
def test_axes_that_say_nothing_of_a_model_are_a_wrong_question(model, world, said):
    result = run("--model", model, "--source", "fsdp2", "--destination", world)
    assert result.exit_code == 2
    assert said in result.stderr


def test_a_word_says_whose_rules_count(model):
    entry = model_plan(model, destination="megatron tp4").dst[0].entry("model.layers.0.self_attn.k_proj.weight")
    held = {rank: str(box) for box, ranks in entry.holdings[0].boxes(entry.spec) for rank in ranks}
    assert held == {9: "[0:4, 0:8)", 11: "[4:8, 0:8)"}  # ranks 8 and 10 have q rows only


def test_words_of_models_say_nothing_of_one_tensor():
    result = run("--shape", "8x8", "--source", "megatron tp2 [tp]", "--destination", "tp=2 [tp]")
    assert result.exit_code == 2
    assert "'megatron' is for whole models (--model)" in result.stderr


def test_a_model_of_the_catalogue_needs_no_file():
    result = run("--model", "qwen3-0.6b", "--source", "tp2 pp2", "--destination", "tp4", "--json")
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["tensors"] == 310
    assert "tp2 pp2: a Megatron-like trainer on 4 ranks: 2 stages of 14 layers, tensors over 2" in result.stderr


def test_an_unknown_name_is_answered_with_the_nearest():
    result = run("--model", "qwen3-06b", "--source", "tp2", "--destination", "tp4")
    assert result.exit_code == 2
    assert "is no model of the catalogue. Nearest: qwen3-0.6b" in result.stderr


def test_a_config_alone_stands_for_a_model(tmp_path):
    config = CONFIG | {"model_type": "llama", "hidden_size": 8, "intermediate_size": 12, "vocab_size": 50}
    path = write(tmp_path, "config.json", config | {"num_hidden_layers": 1, "head_dim": 4})
    plans = [plan_of("--model", given, "--source", "fsdp8", "--destination", "tp2 dp2") for given in (tmp_path, path)]
    assert plans[0] == plans[1]
    assert {spec.name: list(spec.shape) for spec in plans[0].specs} == {
        name: shape for name, shape in TENSORS.items() if "bias" not in name and "q_norm" not in name
    } | {"model.layers.0.post_attention_layernorm.weight": [8]}


def test_a_config_of_an_unknown_family_is_a_wrong_question(tmp_path):
    path = write(tmp_path, "config.json", {"model_type": "rnn"})
    result = run("--model", path, "--source", "fsdp2", "--destination", "tp2")
    assert result.exit_code == 2
    assert "no rule gives the names and shapes of a model of the type 'rnn'" in result.stderr


TWO_RANKS = ("--shape", "8x8", "--source", "a=1 []", "--destination", "b=1 []")


@pytest.mark.parametrize(
    ("cluster", "said"),
    [
        ("gb300", "'gb300' is neither a preset nor a file. Presets: dgx-h100, gb200-nvl72, one-host."),
        ("gb300", "hosts, as in '0-1 / 2-5 @ 2Gbit'"),
        ("dgx-h10", "Is 'dgx-h100' meant?"),
        ("", "'' is neither a preset nor a file"),
        ("0 / 0-1 @ 2Gbit", "names ranks 0, 1, and 0 more than once; the plan has ranks 0, 1."),
        ("0 / 1 @ 2GB", "'2GB' is not a rate"),
        ("one-host spine=2", "Topology 'one-host' of 1 domain has no leaf switches"),
        ("dgx-h100 spine=2", "has no leaf switches"),
        ("no-topology.json", "no-topology.json is not a topology (Topology.to_json): it has no 'domains'."),
        ("list.json", "list.json is not a topology (Topology.to_json): it holds no JSON object."),
    ],
)
def test_a_cluster_that_is_none_is_answered_with_those_there_are(cluster, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "no-topology.json").write_text('{"name": "x"}', "utf-8")
    (tmp_path / "list.json").write_text("[]", "utf-8")
    result = run(*TWO_RANKS, "--cluster", cluster)
    assert (result.exit_code, result.stdout) == (2, "")
    assert said in result.stderr
    assert result.stderr.startswith("ConfigError: "), "nothing but the message"
    assert result.stderr.count("\n") == 1


def test_a_refused_question_is_answered_with_the_error_alone():
    asked = ("--model", "qwen3-0.6b", "--source", "fsdp2", "--destination", "tp2")
    refused = run(*asked, "--cluster", "gb300")
    assert refused.stderr.startswith("ConfigError: Cluster 'gb300'")
    assert "fsdp2: an FSDP-like trainer" in run(*asked).stderr


def test_more_stages_than_layers_are_refused():
    result = run("--model", "qwen3-0.6b", "--source", "pp29", "--destination", "tp2")
    assert result.exit_code == 2
    assert "the model has 28 layers for 29 stages, and each takes at least one" in result.stderr
    assert run("--model", "qwen3-0.6b", "--source", "pp28", "--destination", "tp2").exit_code == 0
