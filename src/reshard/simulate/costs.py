"""Costs: what moving bytes takes beside the rates of ports and fast links, which the topology has."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Literal

from reshard.errors import ConfigError

if TYPE_CHECKING:
    from reshard.simulate.run_rates import RunRates

CopyKind = Literal["run", "strided", "warm", "staging", "fresh", "lent"]

Watched = Literal["none", "network", "all"]
"""Whose messages can be waited for all at once: of no transport, of the network's, or of the one that has them all."""


@dataclass(frozen=True, slots=True)
class CpuCosts:
    """What ranks pay that share the cores of one machine, as the hosts of a benchmark do.

    Args:
        cores: Of the machine, for all ranks together.
        local_send: Seconds of a core that a byte takes the sender, to a rank of its host.
        local_receive: That it takes the receiver.
        network_send: As ``local_send``, to a rank of another host.
        network_receive: As ``local_receive``, from a rank of another host.
        strided_bytes_per_second: Payload that a rank copies from or to where it does not lie in one run; at 0 as
            ``copy_bytes_per_second``.
        strided: The same by how long its runs are; None where only the one rate is known.
        lent: Out of memory that another process has filled, by how long its runs are; None as out of the rank's own.
        warm_bytes_per_second: Into a buffer that is used again and again, or out of it; at 0 likewise.
        staging_bytes_per_second: The same where another rank takes the other copy; at 0 likewise.
        fresh_bytes_per_second: Into memory that the system has just given; at 0 as ``copy_bytes_per_second``.
        box_seconds: What a copy takes for each box, beside its bytes.
        network_message_seconds: As ``message_seconds``, over the network; at 0 the same.
        stages_runs: Whether a bucket for a rank of the same host goes through staging even where it lies in one run of
            memory, as over shared memory. Over the network it does not.

    Raises:
        ConfigError: No core, or a negative cost.
    """

    cores: float
    local_send: float = 0.0
    local_receive: float = 0.0
    network_send: float = 0.0
    network_receive: float = 0.0
    strided_bytes_per_second: float = 0.0
    strided: RunRates | None = None
    lent: RunRates | None = None
    warm_bytes_per_second: float = 0.0
    staging_bytes_per_second: float = 0.0
    fresh_bytes_per_second: float = 0.0
    box_seconds: float = 0.0
    network_message_seconds: float = 0.0
    stages_runs: bool = True

    def __post_init__(self) -> None:
        if not self.cores > 0:
            raise ConfigError(f"cores is {self.cores}; a machine has at least a part of one.")
        for name in _CPU_COSTS:
            if not 0 <= getattr(self, name) < float("inf"):
                raise ConfigError(f"{name} is {getattr(self, name)}; a cost is finite and not negative.")


_CPU_COSTS = tuple(
    field.name for field in fields(CpuCosts) if field.name not in ("cores", "strided", "lent", "stages_runs")
)


@dataclass(frozen=True, slots=True)
class Costs:
    """What a rank pays for copies and messages.

    Args:
        copy_bytes_per_second: Payload that a rank packs or unpacks in a second; infinite where copies are free.
        message_seconds: What a rank is busy with to post a message or to finish one, beside its bytes.
        latency_seconds: From a message's departure to its arrival over the network, where the topology says none.
        local_bytes_per_second: Of the fast link of a rank, each way, where the topology has no domain that says it.
        local_latency_seconds: As ``latency_seconds``, over the fast link.
        source: Where the numbers come from, in words.
        cpu: Where all ranks share the cores of one machine: what that adds. A byte on its way then takes the cores of
            both ends, and copies take them too, so that what is done at once goes on slower.
        watched: Which transports tell what is done first, as gloo's does on CPUs: a rank all of whose messages are
            theirs, and which packs none, acts on whichever comes first. Others carry out rounds in order.

    Raises:
        ConfigError: A rate that is not above zero, or a negative time.
    """

    copy_bytes_per_second: float = float("inf")
    message_seconds: float = 0.0
    latency_seconds: float = 0.0
    local_bytes_per_second: float = float("inf")
    local_latency_seconds: float = 0.0
    source: str = ""
    cpu: CpuCosts | None = None
    watched: Watched = "none"

    def __post_init__(self) -> None:
        for name in ("copy_bytes_per_second", "local_bytes_per_second"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; a rate is above 0. Use inf for what is free.")
        for name in ("message_seconds", "latency_seconds", "local_latency_seconds"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ConfigError(
                    f"{name} is {getattr(self, name)}; a time is finite and not negative. Use 0 for none."
                )

    def copy_seconds(self, nbytes: int, kind: CopyKind = "run", *, boxes: int = 1, run_nbytes: int = 0) -> float:
        """What copying takes the rank that does it, alone on its core.

        Args:
            nbytes: How much.
            kind: How memory lies: in one ``run`` on both sides, ``strided`` on one of them, to or from a ``warm``
                buffer or ``staging`` memory, into ``fresh`` memory, which the system has just given, or out of memory
                that another rank has ``lent``.
            boxes: In how many boxes.
            run_nbytes: How long the runs are in which it lies where they are shorter, for ``strided`` and ``lent``; 0
                where that is not known, and then ``lent`` memory is one run.
        """
        cpu = self.cpu
        if cpu is None:
            return nbytes / self.copy_bytes_per_second
        return nbytes / self._cpu_rate(cpu, kind, nbytes, run_nbytes) + boxes * cpu.box_seconds

    def _cpu_rate(self, cpu: CpuCosts, kind: CopyKind, nbytes: int, run_nbytes: int) -> float:
        if kind == "lent" and cpu.lent is not None:
            return cpu.lent.at(run_nbytes or max(1, nbytes))
        if kind == "lent":
            kind = "strided" if 0 < run_nbytes < nbytes else "run"
        if kind == "strided" and cpu.strided is not None and run_nbytes:
            return cpu.strided.at(run_nbytes)
        rates = {
            "run": 0.0,
            "strided": cpu.strided_bytes_per_second,
            "warm": cpu.warm_bytes_per_second,
            "staging": cpu.staging_bytes_per_second,
            "fresh": cpu.fresh_bytes_per_second,
        }
        return rates[kind] or self.copy_bytes_per_second


# NCCL's own cost table (v2.28.7-1, src/graph/tuning.cc, ring, protocol Simple): 8.4 us to launch an operation
# (baseLatencies), 14 us a network hop and 3.4 us an NVLink hop (hwLatencies). A step's send and receive are launched
# together, so a message has half a launch. They are what NCCL chooses algorithms by, not measurements of a refit.
NCCL_LAUNCH, _NCCL_NETWORK, _NCCL_NVLINK = 8.4e-6, 14e-6, 3.4e-6

H100 = Costs(
    # NVIDIA H100 SXM data sheet: 3.35 TB/s of HBM3; a copy reads and writes each byte
    copy_bytes_per_second=3.35e12 / 2,
    message_seconds=NCCL_LAUNCH / 2,
    latency_seconds=_NCCL_NETWORK,
    # data sheet: NVLink 900 GB/s both directions together
    local_bytes_per_second=450e9,
    local_latency_seconds=_NCCL_NVLINK,
    source="H100 SXM data sheet (HBM 3.35 TB/s, NVLink 450 GB/s a direction) and NCCL's table of latencies",
)

GB200 = Costs(
    # NVIDIA GB200 NVL72 data sheet: 576 TB/s of HBM3e over 72 GPUs, so 8 TB/s each; a copy reads and writes each byte
    copy_bytes_per_second=8e12 / 2,
    message_seconds=NCCL_LAUNCH / 2,
    latency_seconds=_NCCL_NETWORK,
    # data sheet: NVLink 1.8 TB/s both directions together
    local_bytes_per_second=900e9,
    local_latency_seconds=_NCCL_NVLINK,
    source="GB200 NVL72 data sheet (HBM 8 TB/s, NVLink 900 GB/s a direction, each GPU) and NCCL's table of latencies",
)

CPU_HOST = Costs(
    # measured on a two-core cloud machine, gloo over loopback: one core copies 10 GB/s warm, a message costs 66 us on
    # both ends together, and 70 to 135 us pass from one end to the other
    copy_bytes_per_second=10e9,
    message_seconds=33e-6,
    latency_seconds=100e-6,
    local_bytes_per_second=10e9,
    local_latency_seconds=20e-6,
    watched="all",
    source="a two-core machine with gloo: one core copies 10 GB/s, a message costs 33 us an end",
)

PRESETS = {"dgx-h100": H100, "gb200-nvl72": GB200, "gpus": H100, "cpu-host": CPU_HOST}
"""By the name of a topology; ``cpu-host`` for what is joined otherwise."""


def costs_for(name: str) -> Costs:
    """The costs of a topology's preset, by the first word of its name; those of CPU hosts where it has none.

    >>> costs_for("gb200-nvl72 spine=2").local_bytes_per_second
    900000000000.0
    """
    return PRESETS.get(name.partition(" ")[0], CPU_HOST)
