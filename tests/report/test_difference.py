from tests.report.plans import many_experts, rows_to_columns, two_engines

from reshard.report.difference import compare_plans, describe_difference


def test_equal_plans_do_not_differ():
    difference = compare_plans(two_engines(), two_engines())
    assert difference.equal
    assert (difference.layouts, difference.pairs, difference.options, difference.worlds) == ((), (), (), ())
    assert describe_difference(difference).startswith("The plans are equal: digest ")


def test_another_tp_of_one_engine_changes_only_what_that_engine_gets():
    before, after = two_engines(tp=2), two_engines(tp=4)
    difference = compare_plans(before, after)
    assert not difference.equal
    assert [(c.name, c.count, c.source, c.destination) for c in difference.layouts] == [
        ("layers.{0-2}.up.weight", 3, False, True)
    ]
    (change,) = difference.layouts
    assert change.cuts == (("gen0", "2 boxes of 32 x 64, each on 2 ranks", "4 boxes of 16 x 64"),)
    line = "  layers.{0-2}.up.weight (3): gen0: 2 boxes of 32 x 64, each on 2 ranks -> 4 boxes of 16 x 64"
    assert line in describe_difference(difference).splitlines()
    assert {(w.world, w.changed > 0) for w in difference.receivers} == {("gen0", True), ("gen1", False)}
    between = {change.label: (change.before, change.after) for change in difference.between_worlds}
    # TP2 x DP2 wants the rows of `up` twice, TP4 once: 3 tensors of 8 KiB less
    assert between["trainer -> gen0"][0] - between["trainer -> gen0"][1] == 3 * 64 * 64 * 2
    assert between["trainer -> gen1"][0] == between["trainer -> gen1"][1]
    wire = next(change for change in difference.totals if change.label == "on the wire")
    assert (wire.before, wire.after) == (before.wire_nbytes, after.wire_nbytes)
    assert sum(change.after - change.before for change in difference.pairs) == wire.after - wire.before


def test_ranks_count_in_their_worlds_so_that_a_grown_world_does_not_move_the_others():
    small, large = many_experts(layers=1), rows_to_columns()
    worlds = {change.label: (change.before, change.after) for change in compare_plans(small, large).worlds}
    assert worlds == {"world": (256, 0), "trainer": (0, 2), "gen0": (0, 4)}


def test_tensors_that_came_and_went_are_named_by_families():
    difference = compare_plans(many_experts(layers=2), many_experts(layers=1))
    assert difference.removed[:2] == (
        "model.layers.1.mlp.experts.0.up_proj.weight",
        "model.layers.1.mlp.experts.1.up_proj.weight",
    )
    assert difference.removed[3] == "29 more of model.layers.{0, 1}.mlp.experts.{0-31}.up_proj.weight"
    assert difference.added == ()
    other = compare_plans(many_experts(layers=1), rows_to_columns())
    assert other.removed == ("model.layers.0.mlp.experts.{0-31}.up_proj.weight",)
    assert other.added == ("layers.0.up.weight",)


def test_another_strategy_and_other_hosts_are_options_that_differ():
    assert compare_plans(rows_to_columns(), rows_to_columns("gather-broadcast")).options == (
        ("strategy", "reshard", "gather-broadcast"),
    )
    assert compare_plans(two_engines(), two_engines(hosts=True)).options == (
        ("topology", "one-host, 1 domain, 0 ports", "hosts, 5 domains, 5 ports"),
    )


def test_the_text_lists_as_many_pairs_as_are_asked_for():
    difference = compare_plans(two_engines(tp=2), two_engines(tp=4))
    text = describe_difference(difference, limit=2)
    assert f"pairs that changed: {len(difference.pairs)}" in text
    assert f"... and {len(difference.pairs) - 2} more; --limit 0 shows all" in text
    assert len(describe_difference(difference, limit=0).splitlines()) > len(text.splitlines())
