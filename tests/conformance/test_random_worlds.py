"""Random worlds: whatever the layouts, pieces and memory, the dense copy lands, and not a byte beside it."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from reshard.plan.plan import STRATEGIES, plan_refit
from reshard.testing.memory_world import run_plan
from reshard.testing.processes import RanksFailed
from reshard.testing.strategies import cases, topologies

STAGING = st.sampled_from((512, 1 << 10, 1 << 12, 1 << 16))
SLOW_TO_DRAW = settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


def move(case, *, topology=None, strategy="reshard", staging_nbytes=1 << 12, verify="none", runs=1):
    """Carry out a case, and look at every byte of every destination buffer."""
    plan = plan_refit(case.src, case.dst, topology, strategy=strategy, cut_nbytes=32)
    src = {plan.rank_of(case.src.world, rank): memory for rank, memory in case.src_memory.items()}
    dst = {plan.rank_of(case.dst.world, rank): memory for rank, memory in case.dst_memory.items()}
    for memory in src.values():
        memory.fill(case.whole)
    for memory in dst.values():
        memory.poison(case.whole)

    def look(rank):
        if rank in dst:
            dst[rank].check(case.whole, plan.rank_name(rank))
            dst[rank].poison(case.whole)

    try:
        run_plan(
            plan,
            {rank: memory.pieces for rank, memory in src.items()},
            {rank: memory.pieces for rank, memory in dst.items()},
            staging_nbytes=staging_nbytes,
            verify=verify,
            runs=runs,
            after_run=look,
            timeout=20,
        )
    except RanksFailed as error:
        # A copy inside one rank between two interleavings of one dim is refused where they have no common grid.
        assume("no common grid" not in str(error))
        raise
    for rank, memory in src.items():
        memory.check(case.whole, f"source memory of {plan.rank_name(rank)}")


@settings(SLOW_TO_DRAW, max_examples=250)
@given(cases(), st.sampled_from(STRATEGIES), STAGING)
def test_every_element_lands_in_its_place_and_nothing_beside_it(case, strategy, staging_nbytes):
    move(case, strategy=strategy, staging_nbytes=staging_nbytes)


@settings(SLOW_TO_DRAW, max_examples=200)
@given(cases(), STAGING, st.data())
def test_bytes_that_are_handed_on_between_domains_are_right_too(case, staging_nbytes, data):
    same = case.src.world == case.dst.world
    size = max(case.src.size, case.dst.size) if same else case.src.size + case.dst.size
    move(case, topology=data.draw(topologies(size)), staging_nbytes=staging_nbytes)


@settings(SLOW_TO_DRAW, max_examples=50)
@given(cases(), st.sampled_from(STRATEGIES))
def test_the_same_programs_run_again_and_again(case, strategy):
    move(case, strategy=strategy, runs=3)


@pytest.mark.parametrize("verify", ["sum", "fingerprint"])
@settings(SLOW_TO_DRAW, max_examples=150)
@given(case=cases(), strategy=st.sampled_from(STRATEGIES), staging_nbytes=STAGING)
def test_verification_raises_no_false_alarm(case, strategy, staging_nbytes, verify):
    move(case, strategy=strategy, staging_nbytes=staging_nbytes, verify=verify)
