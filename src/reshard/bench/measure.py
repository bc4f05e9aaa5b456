"""Measure: run operations interleaved after a barrier, on every rank's own clock; put the ranks' samples together.

The clock is CLOCK_MONOTONIC, which all processes of one machine share, so a run lasts from the first rank's start to
the last rank's end.
"""

from __future__ import annotations

import gc
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from reshard.bench.case import Memory
    from reshard.bench.operation import Operation
    from reshard.bench.tokens import Tokens

FIRST_VERSION, LAST_VERSION = 1, 2
"""Values that the source has in the comparison before the measured runs, and in the one after them."""


@dataclass
class RankSamples:
    """What one rank saw of one operation."""

    takes_part: bool
    starts: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)
    wire_nbytes: int = 0
    buffer_nbytes: int = 0
    growth_nbytes: int = 0
    """How far the peak of this process's memory rose in a steady run; 0 where the system does not tell."""
    compared: list[int] = field(default_factory=list)
    """Elements compared, once for each comparison."""


def measure(
    operations: Sequence[tuple[Operation, Memory]], rank: int, tokens: Tokens, *, repeat: int
) -> dict[str, RankSamples]:
    """Run every operation ``repeat`` times on this rank; all ranks call it with equal lists.

    Before and after the measured runs every operation is run once more with other values, over poison, and all that
    it brought is compared. The first of these runs is also the warm-up.
    """
    samples = {operation.name: RankSamples(operation.takes_part) for operation, _ in operations}
    _compare_all(operations, samples, rank, tokens, FIRST_VERSION)
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        for turn in range(repeat):
            first = turn % len(operations)  # so that no operation always follows the same one
            for operation, _ in (*operations[first:], *operations[:first]):
                _run_once(operation, samples[operation.name], rank, tokens)
    finally:
        gc.enable()
        gc.unfreeze()
    _compare_all(operations, samples, rank, tokens, LAST_VERSION)
    return samples


def _run_once(operation: Operation, samples: RankSamples, rank: int, tokens: Tokens) -> None:
    tokens.meet(rank)
    cpu = time.process_time()
    start = time.monotonic()
    operation.run()
    end = time.monotonic()
    samples.cpu_seconds.append(time.process_time() - cpu)
    samples.starts.append(start)
    samples.ends.append(end)


def _compare_all(
    operations: Sequence[tuple[Operation, Memory]],
    samples: Mapping[str, RankSamples],
    rank: int,
    tokens: Tokens,
    version: int,
) -> None:
    for operation, memory in operations:
        mine = samples[operation.name]
        memory.prepare(version)
        tokens.meet(rank)
        before = reset_peak_nbytes()
        operation.run()
        mine.growth_nbytes = peak_nbytes() - before  # the last one counts: the first run also maps what is kept
        mine.wire_nbytes, mine.buffer_nbytes = operation.wire_nbytes, operation.buffer_nbytes
        tokens.meet(rank)  # sources may hold new values only when everybody has read the old ones
        if operation.brings:
            mine.compared.append(memory.check(version, operation.name))
    for _, memory in operations:
        memory.forget()


def reset_peak_nbytes() -> int:
    """Forget this process's peak of memory so far and return what it has now; 0 where the system has no such thing."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
        return peak_nbytes()
    return 0


def peak_nbytes() -> int:
    """The peak of this process's resident memory; 0 where the system does not tell."""
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) << 10
    return 0


@dataclass(frozen=True)
class Figures:
    """One operation, all ranks together."""

    seconds: tuple[float, ...]
    """By repetition: the last rank's end minus the first rank's start."""
    cpu_seconds: tuple[float, ...]
    """By repetition: of all threads of all ranks."""
    wire_nbytes: int
    """Payload that came to a rank from another in one run, over whatever link."""
    peak_extra_nbytes: int
    """The most that one rank had beside source and destination: buffers kept, and the rise of its peak in a run
    (VmHWM), which shows what is allocated and freed again."""
    compared: tuple[int, ...]
    """Elements compared, all ranks together, before the measured runs and after them."""

    @property
    def median_seconds(self) -> float:
        return median(self.seconds)

    @property
    def median_cpu_seconds(self) -> float:
        return median(self.cpu_seconds)


def put_together(ranks: Sequence[Mapping[str, RankSamples]]) -> dict[str, Figures]:
    """The figures of every operation from the samples of all ranks."""
    figures = {}
    for name in ranks[0]:
        all_of = [samples[name] for samples in ranks]
        clocks = [samples for samples in all_of if samples.takes_part]
        runs = range(len(clocks[0].starts))
        figures[name] = Figures(
            tuple(max(s.ends[run] for s in clocks) - min(s.starts[run] for s in clocks) for run in runs),
            tuple(sum(s.cpu_seconds[run] for s in all_of) for run in runs),
            sum(s.wire_nbytes for s in all_of),
            max(s.buffer_nbytes + s.growth_nbytes for s in all_of),
            tuple(map(sum, zip(*(s.compared for s in all_of), strict=True))),
        )
    return figures
