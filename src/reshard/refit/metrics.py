"""Metrics: what Prometheus is told of a session: the version served, refit seconds by phase, failures by error.

They are counted here, and given out in three ways: as text, as a file for the node exporter's textfile collector, and
to the registry of ``prometheus_client`` where that is installed.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from reshard.errors import EnvironmentNotSupported

if TYPE_CHECKING:
    from collections.abc import Iterator

    from reshard.refit.machine import Serving
    from reshard.refit.report import RefitReport

Kind = Literal["gauge", "counter", "summary"]


@dataclass(frozen=True)
class Sample:
    """One number of a family."""

    suffix: str
    labels: tuple[tuple[str, str], ...]
    value: float


@dataclass(frozen=True)
class Family:
    """A metric with its numbers, one for each choice of labels."""

    name: str
    kind: Kind
    help: str
    samples: tuple[Sample, ...]


class Metrics:
    """The numbers of one rank of a session since it was opened.

    Args:
        session: Its name.
        world: This rank's world.
        rank: Its number there.
    """

    def __init__(self, session: str, world: str, rank: int) -> None:
        self._labels = (("session", session), ("world", world), ("rank", str(rank)))
        self._lock = threading.Lock()
        self._serving: Serving | None = None
        self._refits = 0
        self._nbytes = {"sent": 0, "received": 0}
        self._phases: dict[str, tuple[int, float]] = {}
        self._failures: dict[str, int] = {}

    # -- what happens --------------------------------------------------------------------------------------------------

    def refitted(self, report: RefitReport, serving: Serving) -> None:
        """Count a refit that completed."""
        with self._lock:
            self._serving = serving
            self._refits += 1
            self._nbytes["sent"] += report.sent_nbytes
            self._nbytes["received"] += report.received_nbytes
            for phase, seconds in report.phases.items():
                count, total = self._phases.get(phase, (0, 0.0))
                self._phases[phase] = (count + 1, total + seconds)

    def failed(self, error: BaseException, serving: Serving) -> None:
        """Count a refit that failed."""
        name = type(error).__name__
        with self._lock:
            self._serving = serving
            self._failures[name] = self._failures.get(name, 0) + 1

    # -- how it is told ------------------------------------------------------------------------------------------------

    def families(self) -> tuple[Family, ...]:
        """All metrics as they are now."""
        with self._lock:
            return tuple(self._families())

    def _families(self) -> Iterator[Family]:
        serving = self._serving
        versions = [] if serving is None or serving.version is None else [self._sample(serving.version)]
        yield Family("reshard_version_served", "gauge", "Version of the weights that this rank has.", tuple(versions))
        torn = self._sample(float(serving is not None and serving.torn))
        yield Family("reshard_torn", "gauge", "1 while old and new weights may be mixed on this rank.", (torn,))
        yield Family("reshard_refits", "counter", "Refits that completed.", (self._sample(self._refits, "_total"),))
        yield Family(
            "reshard_refit_failures",
            "counter",
            "Refits that failed, by the name of the error.",
            tuple(self._sample(n, "_total", error=error) for error, n in sorted(self._failures.items())),
        )
        yield Family(
            "reshard_refit_bytes",
            "counter",
            "Payload bytes that this rank exchanged with others.",
            tuple(self._sample(n, "_total", direction=name) for name, n in self._nbytes.items()),
        )
        rows = sorted(self._phases.items())
        counts = [self._sample(count, "_count", phase=phase) for phase, (count, _) in rows]
        sums = [self._sample(total, "_sum", phase=phase) for phase, (_, total) in rows]
        yield Family("reshard_refit_seconds", "summary", "Seconds of refits by phase.", (*counts, *sums))

    def _sample(self, value: float, suffix: str = "", **labels: str) -> Sample:
        return Sample(suffix, (*self._labels, *labels.items()), float(value))

    def text(self) -> str:
        """In Prometheus' text format."""
        lines = []
        for family in self.families():
            name = family.name + ("_total" if family.kind == "counter" else "")
            lines += [f"# HELP {name} {family.help}", f"# TYPE {name} {family.kind}"]
            for sample in family.samples:
                labels = ",".join(f'{key}="{_escaped(value)}"' for key, value in sample.labels)
                lines.append(f"{family.name}{sample.suffix}{{{labels}}} {sample.value:.17g}")
        return "\n".join(lines) + "\n"

    def write(self, file: str | Path) -> None:
        """Write the text to a file, whole or not at all, e.g. ``reshard-0.prom`` for the node exporter."""
        beside = Path(f"{file}.{os.getpid()}~")
        beside.write_text(self.text(), "utf-8")
        beside.replace(file)

    def register(self, registry: Any = None) -> None:
        """Let ``prometheus_client`` collect them.

        Args:
            registry: Its ``CollectorRegistry``; the default one if not given.

        Raises:
            EnvironmentNotSupported: ``prometheus_client`` is not installed.
        """
        try:
            import prometheus_client
            from prometheus_client.core import Metric
        except ImportError as error:
            raise EnvironmentNotSupported(
                f"Metrics cannot be registered: {error}. Install prometheus_client: pip install 'reshard[metrics]', or "
                f"write them to a file for the node exporter (metrics.write)."
            ) from error
        metrics = self

        class Collector(prometheus_client.registry.Collector):  # type: ignore[misc, unused-ignore]
            def collect(self) -> Iterator[Any]:
                for family in metrics.families():
                    metric = Metric(family.name, family.help, family.kind)
                    for sample in family.samples:
                        metric.add_sample(family.name + sample.suffix, dict(sample.labels), sample.value)
                    yield metric

        (registry or prometheus_client.REGISTRY).register(Collector())


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
