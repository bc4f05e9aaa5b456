"""Run rates: how fast memory is copied by how long the runs are in which it lies, from lengths that were measured."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import inf, log

from reshard.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RunRates:
    """Bytes a second of copies, one side of which lies in runs of some length with gaps between them.

    Short runs are slower: with each, the processor has to guess anew what is read next, and looks up another page.

    Args:
        measured: Pairs of a run's bytes and the rate, by ascending length.

    Raises:
        ConfigError: There is no pair, lengths do not ascend from above 0, or a rate is not above 0.
    """

    measured: tuple[tuple[int, float], ...]

    def __post_init__(self) -> None:
        lengths = [0, *(length for length, _ in self.measured)]
        ascends = len(lengths) > 1 and all(one < other for one, other in pairwise(lengths))
        if not ascends or not all(0 < rate < inf for _, rate in self.measured):
            raise ConfigError(
                f"measured is {list(self.measured)}; it has pairs of a run's bytes, ascending and above 0, and of a "
                f"finite rate above 0."
            )

    def at(self, run_nbytes: int) -> float:
        """The rate of runs of some length; beyond what was measured, that of the nearest length.

        Between two lengths, what a byte takes changes evenly with the logarithm of the length.

        >>> rates = RunRates(((1024, 2e9), (4096, 4e9)))
        >>> rates.at(512), rates.at(4096), round(rates.at(2048) / 1e9, 3)
        (2000000000.0, 4000000000.0, 2.667)
        """
        if run_nbytes <= self.measured[0][0]:
            return self.measured[0][1]
        for (short, slow), (long, fast) in pairwise(self.measured):
            if run_nbytes < long:
                part = log(run_nbytes / short) / log(long / short)
                return slow / (1 + part * (slow / fast - 1))
        return self.measured[-1][1]
