"""Operation: one way of bringing a case's tensors over, as one rank carries it out; refits are the first of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from reshard.refit.compile import compile_refit
from reshard.transports.recorder import Recorder

if TYPE_CHECKING:
    from datetime import timedelta

    import torch.distributed as dist

    from reshard.bench.case import Memory
    from reshard.plan.plan import Plan
    from reshard.transports.recorder import Row


class Operation(ABC):
    """One rank's part; all ranks make the same operations in the same order, and run them together."""

    name: str
    takes_part: bool = True
    """Whether this rank's clock counts."""
    brings: bool = True
    """Whether the destination holds the tensors afterwards."""
    wire_nbytes: int = 0
    """Payload that comes to this rank from others in one run, over whatever link."""
    buffer_nbytes: int = 0
    """Memory that this rank keeps for it beside source and destination."""
    after_network_seconds: float | None = None
    """From the last bucket that this rank took over the network to the end of its last run, where it can tell."""

    def __init__(self, name: str) -> None:
        self.name = name

    @abstractmethod
    def run(self) -> None:
        """Bring the tensors over once."""


class Refit(Operation):
    """A compiled refit in its steady state: everything that ``CompiledRefit.run`` does is measured.

    Args:
        name: What the report calls it.
        group: A process group of its own, so that its staging memory can be told from others'.
        memory: This rank's memory.
        shared: Whether the source's tensors lie in shared memory.
        timeout: Of one run.
        strategy: As ``compile_refit`` has it, and so the others.
        transport: "torch_p2p" or "shm".
        verify: "none", "sum" or "fingerprint".
        bucket_nbytes: None for the library's choice.
        depth: None for the library's choice.
        staging_nbytes: The most staging memory for a rank.
    """

    def __init__(
        self,
        name: str,
        group: dist.ProcessGroup,
        memory: Memory,
        *,
        shared: bool,
        timeout: timedelta,
        strategy: str = "reshard",
        transport: str = "shm",
        verify: str = "none",
        bucket_nbytes: int | None = None,
        depth: int | None = None,
        staging_nbytes: int = 64 << 20,
    ) -> None:
        super().__init__(name)
        src, dst = memory.manifest(shared=shared)
        self._timeout = timeout
        self._group = group  # the refit's state lives as long as the group
        self._refit = compile_refit(
            group,
            src=src,
            dst=dst,
            strategy=strategy,
            transport=transport,
            verify=verify,
            staging_nbytes=staging_nbytes,
            bucket_nbytes=bucket_nbytes,
            depth=depth,
            timeout=timeout,
        )

    @property
    def plan(self) -> Plan:
        """What all ranks follow."""
        return self._refit.plan

    def recorded_run(self) -> list[Row]:
        """Run once more and say what this rank did when."""
        recorder = Recorder()
        self._refit.record(recorder)
        try:
            self.run()
        finally:
            self._refit.record(None)
        return recorder.rows

    def run(self) -> None:
        report = self._refit.run(self._timeout)
        self.wire_nbytes, self.buffer_nbytes = report.wire_nbytes, report.staging_nbytes
