"""All ranks of a plan in one process: every rank is a thread, the bytes go over the memory transport."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reshard.schedule.schedule import plan_schedule
from reshard.testing.processes import RankContext, threads
from reshard.transports.base import Deadline
from reshard.transports.memory import MemoryTransport
from reshard.transports.operations import Link
from reshard.transports.program import Program
from reshard.transports.staging import staging_need
from reshard.transports.views import BoundMemory

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from reshard.layouts.bound import BoundPiece
    from reshard.plan.plan import Plan
    from reshard.schedule.schedule import Schedule
    from reshard.transports.verify import Verify


def run_plan(
    plan: Plan,
    src: Mapping[int, Sequence[BoundPiece]],
    dst: Mapping[int, Sequence[BoundPiece]],
    *,
    schedule: Schedule | None = None,
    staging_nbytes: int = 1 << 20,
    verify: Verify = "none",
    casts: Mapping[str, str] | None = None,
    runs: int = 1,
    after_run: Callable[[int], None] | None = None,
    timeout: float = 60.0,
) -> list[Program]:
    """Carry out a plan with every rank as a thread of this process, and return the programs, by rank.

    Args:
        plan: What is to move; ranks are the plan's.
        src: Source pieces and their memory, by rank; ranks that are left out hold nothing.
        dst: Destination pieces and their memory, by rank.
        schedule: The plan's schedule; made with ``staging_nbytes`` if not given.
        staging_nbytes: The most staging for a rank.
        verify: What is compared after the bytes have landed.
        casts: As ``Program``: the tensors whose memory has another dtype than the plan.
        runs: How often the same programs run.
        after_run: Called on each rank's thread after each of its runs, with the rank.
        timeout: Seconds for all of it.

    Raises:
        RanksFailed: With what the first rank that failed raised.
    """
    schedule = schedule or plan_schedule(plan, staging_nbytes=staging_nbytes)
    world = MemoryTransport.world(plan.size)
    peers: dict[int, set[int]] = {rank: set() for rank in range(plan.size)}
    for sender, receiver in plan.pair_nbytes():
        peers[sender].add(receiver)
        peers[receiver].add(sender)
    busy = sorted({rank for rank in peers if peers[rank]} | set(dst))

    def one_rank(context: RankContext) -> Program:
        rank = busy[context.rank]
        mine = world[rank]
        links = {peer: Link(mine, peer) for peer in sorted(peers[rank])}
        need = staging_need(schedule, rank, links, verify=verify, casts=casts)
        arena = mine.staging(need.send_nbytes + need.receive_nbytes)
        program = Program(
            schedule,
            rank,
            BoundMemory(src.get(rank, ())),
            BoundMemory(dst.get(rank, ())),
            links,
            send_arena=arena[: need.send_nbytes],
            receive_arena=arena[need.send_nbytes :],
            verify=verify,
            casts=casts,
        )
        for _ in range(runs):
            program.run(Deadline(timeout))
            if after_run is not None:
                after_run(rank)
        return program

    return threads(len(busy), one_rank, timeout=timeout)
