"""Calibration: what was measured of one machine - copies, messages, links - as values, and the costs that follow.

Measured by ``reshard.bench.calibrate``; nothing here is taken from a refit or from any other row that is predicted.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

from reshard.errors import ConfigError
from reshard.simulate.costs import Costs, CpuCosts
from reshard.simulate.run_rates import RunRates

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

CALIBRATION_FORMAT = "reshard-calibration-1"


@dataclass(frozen=True, slots=True)
class SocketCosts:
    """A byte and a message over one kind of socket.

    Args:
        send: Seconds of a core that a byte takes the sender.
        receive: That it takes the receiver.
        message_seconds: Seconds of a core that a message takes each end, beside its bytes.
        latency_seconds: From a small message's departure to its arrival.
    """

    send: float
    receive: float
    message_seconds: float
    latency_seconds: float


@dataclass(frozen=True, slots=True)
class Calibration:
    """One machine, as measured while as many processes as it has cores do the same.

    Args:
        cores: Of the machine.
        copy_alone: Bytes a second of one copy in one piece while nothing else runs.
        copy: The same in a process for each core at once.
        strided: Bytes a second where one side lies in short runs.
        warm: Bytes a second out of what another process has filled into a buffer that is used again and again, and out
            of that.
        staging: Bytes a second into such a buffer by one process and out of it by another.
        fresh: Bytes a second into memory that the system has just given.
        box_seconds: Of a copy of next to no bytes, among many that lie on pages of their own.
        sum: Bytes a second of the sums of ``verify="sum"``.
        fingerprint: Bytes a second of the sums of ``verify="fingerprint"``.
        memory: Messages of the shared memory transport; a byte takes nothing beside its copies.
        loopback: Gloo between two processes of one host.
        network: Gloo between two namespaces; None where this machine makes none.
        link_efficiency: Payload of a link in parts of the rate that it was given.
        sizes: What was moved to measure this, in words.
        strided_runs: ``strided`` by how long the runs are; None where it was not measured, as before it was known.
        lent_runs: Bytes a second out of shared memory that another process has filled, by how long the runs are, up to
            all of it in one; None likewise.
    """

    cores: int
    copy_alone: float
    copy: float
    strided: float
    warm: float
    staging: float
    fresh: float
    box_seconds: float
    sum: float
    fingerprint: float
    memory: SocketCosts
    loopback: SocketCosts
    network: SocketCosts | None
    link_efficiency: float
    sizes: str
    strided_runs: RunRates | None = None
    lent_runs: RunRates | None = None

    def costs(self, transport: Literal["gloo", "shm"]) -> Costs:
        """The costs of moving weights between processes of this machine.

        Args:
            transport: Between ranks of one host; between hosts it is gloo.
        """
        local = self.loopback if transport == "gloo" else self.memory
        network = self.network or self.loopback
        return Costs(
            copy_bytes_per_second=self.copy,
            message_seconds=local.message_seconds,
            latency_seconds=network.latency_seconds,
            local_latency_seconds=local.latency_seconds,
            source=f"measured on this machine ({self.sizes})",
            watched="all" if transport == "gloo" else "network",
            cpu=CpuCosts(
                cores=self.cores,
                local_send=local.send,
                local_receive=local.receive,
                network_send=network.send,
                network_receive=network.receive,
                strided_bytes_per_second=self.strided,
                strided=self.strided_runs,
                lent=self.lent_runs,
                warm_bytes_per_second=self.warm,
                staging_bytes_per_second=self.staging,
                fresh_bytes_per_second=self.fresh,
                box_seconds=self.box_seconds,
                network_message_seconds=network.message_seconds,
                stages_runs=transport == "shm",
            ),
        )

    @classmethod
    def median_of(cls, several: Sequence[Calibration]) -> Calibration:
        """What several calibrations of one machine say: the median of each number.

        One of them can differ from the next by a third, by where its processes came to lie in memory and on the cores.

        Args:
            several: One at least; all with a network, or none, and with rates of the same runs, or none.
        """
        values = {field.name: [getattr(one, field.name) for one in several] for field in fields(cls)}
        return cls(**{name: _median(found) for name, found in values.items()})

    def to_json(self) -> dict[str, Any]:
        """Plain data that ``from_json`` reads back."""
        data: dict[str, Any] = {"format": CALIBRATION_FORMAT}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, SocketCosts):
                value = {f.name: getattr(value, f.name) for f in fields(SocketCosts)}
            elif isinstance(value, RunRates):
                value = [list(pair) for pair in value.measured]
            data[field.name] = value
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Calibration:
        """Read what ``to_json`` gave.

        Raises:
            ConfigError: It is not a calibration of this format.
        """
        if data.get("format") != CALIBRATION_FORMAT:
            raise ConfigError(
                f"This is not a calibration: its format is {data.get('format')!r}, not {CALIBRATION_FORMAT!r}. "
                f"'reshard simulate --calibrate FILE' writes one."
            )
        try:
            values = {field.name: data[field.name] for field in fields(cls) if field.name not in _RUNS}
            for name in ("memory", "loopback", "network"):
                values[name] = None if values[name] is None else SocketCosts(**values[name])
            for name in _RUNS:
                pairs = data.get(name)
                values[name] = pairs and RunRates(tuple((int(length), float(rate)) for length, rate in pairs))
            return cls(**values)
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"This calibration lacks something: {error}. Measure it again.") from error


_RUNS = ("strided_runs", "lent_runs")


def _median(values: Sequence[Any]) -> Any:
    first = values[0]
    if isinstance(first, SocketCosts):
        return SocketCosts(*(median(getattr(one, field.name) for one in values) for field in fields(SocketCosts)))
    if isinstance(first, RunRates):
        lengths = [length for length, _ in first.measured]
        return RunRates(tuple((length, median(one.at(length) for one in values)) for length in lengths))
    return median(values) if isinstance(first, float) else first
