from __future__ import annotations

import io
from dataclasses import replace

from rich.console import Console

from reshard.cli.demo import show
from reshard.demo.outcome import Answers, Outcome, RankFacts, Refitted

MIB = 2**20
OUTCOME = Outcome(
    model="tiny",
    parameters=1000,
    model_nbytes=2 * MIB,
    question="What?",
    source="fsdp1",
    destination="tp1",
    before="[garbage]",
    answers=(Answers(1, "Paris.", "Paris.", True), Answers(2, "Rome.", "Rome.", True)),
    refits=(Refitted(1, 0.5, 3 * MIB), Refitted(2, 0.25, 3 * MIB)),
    verified=True,
    mismatches=(),
    step_loss=1.0,
    step_changed=12345,
    seconds=(
        ("gather_broadcast", 1.0),
        ("gather_broadcast_same_transport", 0.75),
        ("point_to_point", 0.5),
        ("reshard", 0.25),
    ),
    forms=(("all_gather", 2.0), ("gather", 1.5), ("own_shards", 1.0)),
    compile_seconds=0.125,
    copies_per_domain=(("source", 0.0), ("destination", 1.0)),
    copies_point_to_point=(("source", 0.0), ("destination", 2.0)),
    ranks=(
        RankFacts("source", 0, 2 * MIB, MIB, 3 * MIB, 0, (("destination 0", "shm: read in place, one copy, since x"),)),
        RankFacts("destination", 0, 2 * MIB, 0, 0, 3 * MIB, (("source 0", "torch_p2p: sent and received"),)),
    ),
    plan="reshard: 3 tensors",
)


def told(outcome):
    out = io.StringIO()
    show(outcome, Console(file=out, width=100, highlight=False, no_color=True))
    return out.getvalue()


def rows(text):
    return [" ".join(line.split()) for line in text.splitlines()]


def test_a_person_sees_answers_ratios_and_bytes():
    lines = rows(told(OUTCOME))
    for line in (
        "destination, poisoned [garbage]",
        "source, version 1 Paris.",
        "destination, refit 2 Rome.",
        "optimizer step: 12,345 weights changed",
        "usual way on gloo, own shards 1.0000 4.00 x",
        "usual way on reshard's transport 0.7500 3.00 x",
        "point to point 0.5000 2.00 x",
        "reshard 0.2500",
        "refit 2 (no new plan) 0.2500",
        "Moved in a refit: 3 MiB, 1.50 copies of the model",
        "source 0 2 MiB 1 MiB 3 MiB - shm, one copy",
        "destination 0 2 MiB - - 3 MiB torch_p2p, sent and received",
        "Every element equals the source's, after both refits and after every timed run.",
    ):
        assert line in lines


def test_what_went_wrong_is_said():
    answers = (OUTCOME.answers[0], replace(OUTCOME.answers[1], destination="Pisa.", agree=False))
    wrong = replace(OUTCOME, verified=False, mismatches=("destination rank 0: 3 elements",), answers=answers)
    assert not wrong.ok
    lines = rows(told(wrong))
    assert "destination rank 0: 3 elements" in lines
    assert "An answer of the destination differs from the source's." in lines
    assert not any(line.startswith("Every element") for line in lines)


def test_json_has_the_promised_names():
    told = OUTCOME.to_json()
    assert told["answer"] == {"source": "Paris.", "before": "[garbage]", "after": "Paris."}
    assert told["refits"][1] == {"version": 2, "seconds": 0.25, "nbytes": 3 * MIB}
    assert told["usual_way"]["fastest"] == "own_shards"
    assert {"model", "parameters", "verified", "seconds"} <= set(told)
