"""Costs: what moving bytes takes beside the rates of ports and fast links, which the topology has."""

from __future__ import annotations

from dataclasses import dataclass

from reshard.errors import ConfigError


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

    Raises:
        ConfigError: A rate that is not above zero, or a negative time.
    """

    copy_bytes_per_second: float = float("inf")
    message_seconds: float = 0.0
    latency_seconds: float = 0.0
    local_bytes_per_second: float = float("inf")
    local_latency_seconds: float = 0.0
    source: str = ""

    def __post_init__(self) -> None:
        for name in ("copy_bytes_per_second", "local_bytes_per_second"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; a rate is above 0. Use inf for what is free.")
        for name in ("message_seconds", "latency_seconds", "local_latency_seconds"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ConfigError(
                    f"{name} is {getattr(self, name)}; a time is finite and not negative. Use 0 for none."
                )


# NCCL's own cost table (src/graph/tuning.cc, protocol Simple, ring): 8.4 us to launch an operation, 14 us a network
# hop, 3.4 us an NVLink hop. A step's send and receive are launched together, so a message has half a launch.
_NCCL_LAUNCH, _NCCL_NETWORK, _NCCL_NVLINK = 8.4e-6, 14e-6, 3.4e-6

H100 = Costs(
    # NVIDIA H100 SXM data sheet: 3.35 TB/s of HBM3; a copy reads and writes each byte
    copy_bytes_per_second=3.35e12 / 2,
    message_seconds=_NCCL_LAUNCH / 2,
    latency_seconds=_NCCL_NETWORK,
    # data sheet: NVLink 900 GB/s both directions together
    local_bytes_per_second=450e9,
    local_latency_seconds=_NCCL_NVLINK,
    source="H100 SXM data sheet (HBM 3.35 TB/s, NVLink 450 GB/s a direction) and NCCL's table of latencies",
)

GB200 = Costs(
    # NVIDIA GB200 NVL72 data sheet: 576 TB/s of HBM3e over 72 GPUs, so 8 TB/s each; a copy reads and writes each byte
    copy_bytes_per_second=8e12 / 2,
    message_seconds=_NCCL_LAUNCH / 2,
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
    source="a two-core machine with gloo: one core copies 10 GB/s, a message costs 33 us an end",
)

PRESETS = {"dgx-h100": H100, "gb200-nvl72": GB200, "gpus": H100, "cpu-host": CPU_HOST}
"""By the name of a topology; ``cpu-host`` for what is joined otherwise."""


def costs_for(name: str) -> Costs:
    """The costs of a topology's preset, by its name; those of CPU hosts where it has none.

    >>> costs_for("gb200-nvl72").local_bytes_per_second
    900000000000.0
    """
    return PRESETS.get(name, CPU_HOST)
