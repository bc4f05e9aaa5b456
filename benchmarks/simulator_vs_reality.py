"""The simulator against reality: calibrate this machine, run both benchmarks, and print predicted beside measured.

Run ``python benchmarks/simulator_vs_reality.py`` on a machine that does nothing else (``--calibration FILE...`` reads
earlier calibrations). Nothing is fitted: the calibration measures copies, messages and one link, of other sizes and
of another rate than the rows have; it is launched twice before, between and after the two benchmarks, since a machine
is not always as fast, and the medians count. A row counts as bound by a link where its busiest link needs longer than
the processor seconds that were measured need on all cores, else by the
processor; the aim is 15 % for the first and 30 % for the second kind. Prints one JSON document, and the table as
Markdown on stderr; ``--write`` puts the table with what was measured into ``docs/simulator.md``. ``--measured FILE``
reads such a document and predicts its rows anew.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from reshard.bench import SCENARIOS
from reshard.bench.calibrate import calibrate
from reshard.bench.cluster import run_cluster
from reshard.bench.cluster_scenarios import SCENARIO_NAMES, side_of
from reshard.bench.expected import expected_local
from reshard.bench.expected_cluster import expected_cluster
from reshard.bench.local import run_local
from reshard.simulate.calibration import Calibration
from reshard.units import format_nbytes, parse_nbytes, parse_rate

CALIBRATIONS = 2
AIMS = {"link": 0.15, "processor": 0.30}
DOCS = Path(__file__).parents[1] / "docs" / "simulator.md"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"


@dataclass(frozen=True)
class Sizes:
    """What was measured: the local tensor's side, the cluster's links and bytes, and how often."""

    size: int = 8192
    repeat: int = 5
    rate: str = "2Gbit"
    nbytes: str = "256MiB"
    cluster_repeat: int = 2


@dataclass(frozen=True)
class Row:
    """One row of a benchmark."""

    bench: str
    scenario: str
    name: str
    bound_by: str
    measured_seconds: float
    predicted_seconds: float

    @property
    def difference(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted_seconds / self.measured_seconds - 1

    @property
    def is_within(self) -> bool:
        return abs(self.difference) <= AIMS[self.bound_by]

    def to_json(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return own | {"difference": self.difference, "is_within": self.is_within}


def measured_now(sizes: Sizes, only: str | None, told: list[Calibration]) -> tuple[list[Row], Calibration]:
    """Run the benchmarks, and calibrate before and after each of them unless calibrations are ``told``."""

    def calibrated() -> list[Calibration]:
        return [] if told else [calibrate(_say) for _ in range(CALIBRATIONS)]

    rows, found = [], told + calibrated()
    machine = Calibration.median_of(found)
    if only != "cluster":
        rows += local_rows(machine, sizes.size, sizes.repeat)
        found += calibrated()
    if only != "local":
        rows += cluster_rows(machine, sizes.rate, parse_nbytes(sizes.nbytes), sizes.cluster_repeat)
        found += calibrated()
    return rows, Calibration.median_of(found)


def local_rows(machine: Calibration, size: int, repeat: int) -> list[Row]:
    """Measure ``reshard bench local`` and predict it."""
    report = run_local(scenarios=SCENARIOS, size=size, repeat=repeat, progress=_say)
    rows = []
    for scenario, measured in report["scenarios"].items():
        predicted = expected_local(scenario, size, machine)
        seconds = {**measured["seconds"], **measured.get("whole_or_chunks", {})}
        rows += [
            Row("local", scenario, name, "processor", seconds[name], predicted[name])
            for name in sorted(seconds)
            if name in predicted
        ]
    return rows


def cluster_rows(machine: Calibration, rate: str, nbytes: int, repeat: int) -> list[Row]:
    """Measure ``reshard bench cluster`` and predict it."""
    report = run_cluster(scenarios=SCENARIO_NAMES, rate=rate, nbytes=nbytes, repeat=repeat, progress=_say)
    rows = []
    for measured in report["scenarios"]:
        name, link = measured["name"], report["bytes_per_second"]
        predicted = expected_cluster(name, report["shape"][0], link, machine)
        rows.append(Row("cluster", name, "raw_socket", "link", measured["raw_socket_seconds"], predicted["raw_socket"]))
        for strategy, figures in measured["strategies"].items():
            host = figures["busiest_link"].split()[0]
            text = measured["hosts"][host]["rate"]
            part = int(text.removesuffix("bit")) / 8
            on_cores = figures["cpu_seconds"] / machine.cores
            bound_by = "link" if figures["busiest_link_nbytes"] / part >= on_cores else "processor"
            rows.append(Row("cluster", name, strategy, bound_by, figures["seconds"], predicted[strategy]))
        if "one_host_seconds" in measured:
            seconds = measured["one_host_seconds"]
            rows.append(Row("cluster", name, "reshard_to_one_host", "link", seconds, predicted["reshard_to_one_host"]))
    return rows


def predicted_anew(rows: list[Row], sizes: Sizes, machine: Calibration) -> list[Row]:
    """Rows that were measured before, with what is predicted now."""

    @lru_cache
    def predicted(bench: str, scenario: str) -> dict[str, float]:
        if bench == "local":
            return expected_local(scenario, sizes.size, machine)
        return expected_cluster(scenario, side_of(parse_nbytes(sizes.nbytes)), parse_rate(sizes.rate) / 8, machine)

    return [replace(row, predicted_seconds=predicted(row.bench, row.scenario)[row.name]) for row in rows]


def within(rows: list[Row]) -> dict[str, tuple[int, int]]:
    """By what bounds them: how many rows are as near as they should be, and how many there are."""
    return {
        kind: (sum(row.is_within for row in rows if row.bound_by == kind), sum(row.bound_by == kind for row in rows))
        for kind in AIMS
    }


def described(rows: list[Row], sizes: Sizes, cores: int) -> str:
    """What was measured, how many rows are within the aims, and the table, as Markdown."""
    counts = within(rows)
    (link, links), (cpu, cpus) = counts["link"], counts["processor"]
    side, moved = sizes.size, format_nbytes(parse_nbytes(sizes.nbytes))
    return (
        f"Measured on {cores} cores with everything else at rest (local: bf16 [{side}, {side}] and 1 GB of small "
        f"tensors,\nmedians of {sizes.repeat}; cluster: {moved} over links of {parse_rate(sizes.rate) / 1e9:g} Gbit/s, "
        f"medians of {sizes.cluster_repeat}).\n**{link} of {links} rows that a link bounds are within "
        f"{100 * AIMS['link']:.0f} %, and {cpu} of {cpus} that the processor bounds within "
        f"{100 * AIMS['processor']:.0f} %.**\n\n{table(rows)}"
    )


def write_docs(text: str) -> None:
    """Put it between the marks in the documentation."""
    before, _, rest = DOCS.read_text("utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    if not after:
        sys.exit(f"{DOCS} lacks the marks {BEGIN} and {END}.")
    DOCS.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}", "utf-8")


def table(rows: list[Row]) -> str:
    """The rows as Markdown."""
    lines = [
        "| bench | scenario | row | bound by | measured ms | predicted ms | difference |",
        "|---|---|---|---|--:|--:|--:|",
    ]
    for row in rows:
        miss = "" if row.is_within else " (misses)"
        lines.append(
            f"| {row.bench} | {row.scenario} | {row.name} | {row.bound_by} | {1e3 * row.measured_seconds:.1f} | "
            f"{1e3 * row.predicted_seconds:.1f} | {row.difference:+.0%}{miss} |"
        )
    return "\n".join(lines)


def measured_before(path: Path) -> tuple[list[Row], Sizes, Calibration]:
    """What an earlier run of this program printed."""
    data = json.loads(path.read_text("utf-8"))
    names = Row.__dataclass_fields__
    rows = [Row(**{name: row[name] for name in names}) for row in data["rows"]]
    return rows, Sizes(**data.get("sizes", {})), Calibration.from_json(data["calibration"])


def main() -> None:
    """Calibrate, measure, predict, print."""
    usual = Sizes()
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument(
        "--calibration", type=Path, nargs="+", default=[], help="take the medians of these instead of measuring some"
    )
    options.add_argument("--measured", type=Path, help="predict the rows of an earlier run, and measure nothing")
    options.add_argument("--write", action="store_true", help="put the table into docs/simulator.md")
    options.add_argument("--size", type=int, default=usual.size, help="of the local benchmark's tensor")
    options.add_argument("--repeat", type=int, default=usual.repeat, help="measured runs of each local operation")
    options.add_argument("--rate", default=usual.rate, help="of the cluster's links")
    options.add_argument("--nbytes", default=usual.nbytes, help="of the cluster's tensors")
    options.add_argument(
        "--cluster-repeat", type=int, default=usual.cluster_repeat, help="measured runs of each cluster operation"
    )
    options.add_argument("--only", choices=("local", "cluster"), help="one of the two benchmarks")
    asked = options.parse_args()
    sizes = Sizes(asked.size, asked.repeat, asked.rate, asked.nbytes, asked.cluster_repeat)
    told = [Calibration.from_json(json.loads(file.read_text("utf-8"))) for file in asked.calibration]
    if asked.measured is not None:
        rows, sizes, before = measured_before(asked.measured)
        machine = Calibration.median_of(told or [before])
    else:
        rows, machine = measured_now(sizes, asked.only, told)
    rows = predicted_anew(rows, sizes, machine)
    print(
        json.dumps(
            {
                "calibration": machine.to_json(),
                "sizes": asdict(sizes),
                "within": within(rows),
                "rows": [row.to_json() for row in rows],
            }
        )
    )
    _say(described(rows, sizes, machine.cores))
    if asked.write:
        write_docs(described(rows, sizes, machine.cores))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
