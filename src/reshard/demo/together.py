"""Together: what all ranks of both worlds do in the same order: refit, time every way, and compare every element."""

from __future__ import annotations

import hashlib
import json
import statistics
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from reshard.demo.groups import gloo_group
from reshard.demo.outcome import RankFacts
from reshard.demo.usual_way import FORMS, UsualWay
from reshard.refit.compile import compile_refit
from reshard.refit.connect import connect
from reshard.topology import presets
from reshard.units import format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from reshard.demo.engine import Engine, WantedView
    from reshard.demo.story import Member
    from reshard.demo.trainer import Held, Trainer
    from reshard.layouts.manifest import Manifest
    from reshard.plan.plan import Plan
    from reshard.refit.compiled import CompiledRefit
    from reshard.refit.report import RefitReport
    from reshard.topology.topology import Topology

STRATEGIES = {
    "reshard": "reshard",
    "point_to_point": "point-to-point",
    "gather_broadcast_same_transport": "gather-broadcast",
}
"""By the name in the outcome: the strategies of the library."""

_ANY_RATE = 10**9
"""Bytes a second of a port: with equal ports it changes no route."""


class Together:
    """What all ranks of both worlds do together, in the same order."""

    def __init__(
        self,
        us: Member,
        *,
        src: Manifest | None = None,
        dst: Manifest | None = None,
        held: Sequence[Held] = (),
        trainer: Trainer | None = None,
        views: Sequence[WantedView] = (),
        engine: Engine | None = None,
    ) -> None:
        self._us = us
        self._trainer, self._engine, self._views = trainer, engine, views
        self._mismatches: list[str] = []
        self._refits: list[tuple[float, RefitReport]] = []
        self._held = held
        self._src, self._dst = src, dst
        self._group = gloo_group(us.store, "all", us.all_rank, us.story.size, us.timeout)
        us.say("meeting in a session", together=True)
        self._session = connect(
            us.store,
            role="source" if us.is_source else "destination",
            world=us.name,
            rank=us.rank,
            expect={"source": us.story.source.size, "destination": us.story.destination.size},
            commit="in-place",  # the demo shows that nobody holds more than its own pieces and some staging
            verify="none",  # it compares every element itself, and times the same work as the other ways do
            timeout=us.timeout,
        )
        if trainer is not None:
            self._session.offer(trainer.model)
        else:
            assert dst is not None
            self._session.accept(dst)
        self._compile_seconds = 0.0
        self._seconds: dict[str, list[float]] = {}
        self._plan: Plan
        self._entered: dict[str, int] = {}
        """By strategy: the bytes that this rank took from the other world where each world is a host of its own."""

    def _compile(self, strategy: str, topology: Topology | None = None) -> CompiledRefit:
        return compile_refit(
            self._group,
            src=self._src,
            dst=self._dst,
            strategy=strategy,
            topology=topology,
            timeout=self._us.timeout,
        )

    # -- the refits ------------------------------------------------------------------------------------------------

    def refit_and_compare(self, answer: Callable[[], None] | None = None) -> None:
        """Refit to version 1, check it, and time every way in turn."""
        self._refit()
        if answer is not None:
            answer()
        self._check("after refit 1")
        self._expected = self._content()
        # Only now: until here no rank has had more of the model than its own pieces.
        ways = self._ways()
        rounds = self._us.story.rounds
        for turn in range(rounds):
            self._us.say(f"timing every way, round {turn + 1} of {rounds}", together=True)
            for name, way in ways.items():
                if self._engine is not None:
                    self._engine.poison()
                self._seconds.setdefault(name, []).append(self._timed(way)[0])
                self._compare_with_refit_1(name)
        self._count_copies()

    def _compare_with_refit_1(self, name: str) -> None:
        if self._content() != self._expected:
            self._mismatches.append(f"{self._me}: other bytes than refit 1 left, after {name}")

    def _count_copies(self) -> None:
        """Refit as if each world were on a host of its own, and count what comes from the other one."""
        story = self._us.story
        ranks = [range(story.source.size), range(story.source.size, story.size)]
        topology = presets.hosts(ranks, port_bytes_per_second=_ANY_RATE, names=("source", "destination"))
        self._us.say("refitting as if each world were on a host of its own", together=True)
        for name, strategy in STRATEGIES.items():
            if strategy == "gather-broadcast":
                continue
            refit = self._compile(strategy, topology)
            if self._engine is not None:
                self._engine.poison()
            refit.run(self._us.timeout)
            self._compare_with_refit_1(f"{name} between two hosts")
            theirs = ranks[self._us.is_source]
            taken = refit.schedule.for_rank(self._us.all_rank)
            self._entered[name] = sum(op.bucket.nbytes for op in taken if op.kind == "recv" and op.peer in theirs)

    def _ways(self) -> dict[str, Callable[[], object]]:
        """What is timed, by its name in the outcome: the library's strategies and the usual way by hand."""
        us = self._us
        ways: dict[str, Callable[[], object]] = {}
        for name, strategy in STRATEGIES.items():
            refit = self._compile(strategy)
            if name == "reshard":
                self._plan = refit.plan
            ways[name] = partial(refit.run, us.timeout)
        store, sources, size = dist.PrefixStore("usual", us.store), us.story.source.size, us.story.size
        usual = UsualWay(store, us.all_rank, sources, size, us.timeout, held=self._held, views=self._views)
        return ways | {form: partial(usual.run, form) for form in FORMS}

    def refit_again(self, answer: Callable[[], None] | None = None) -> None:
        """Refit to version 2, without a new plan, and check it."""
        self._refit()
        if answer is not None:
            answer()
        self._check("after refit 2")

    def _refit(self) -> None:
        self._group.barrier().wait(self._us.timeout)
        report = self._session.refit(len(self._refits) + 1)
        planning = sum(report.phases.get(phase, 0.0) for phase in ("meeting", "planning"))
        seconds, planned = self._slowest(report.seconds - planning), self._slowest(planning)
        self._compile_seconds = self._compile_seconds or planned
        self._refits.append((seconds, report))
        self._us.say(f"refit {len(self._refits)} took {format_seconds(seconds)}", together=True)

    def _timed(self, way: Callable[[], Any]) -> tuple[float, Any]:
        """Do it together with all ranks; the seconds are those of the slowest."""
        self._group.barrier().wait(self._us.timeout)
        begun = time.perf_counter()
        result = way()
        return self._slowest(time.perf_counter() - begun), result

    def _slowest(self, seconds: float) -> float:
        most = torch.tensor([seconds], dtype=torch.float64)
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
        self._group.allreduce([most], options).wait(self._us.timeout)
        return most.item()

    # -- the checks ------------------------------------------------------------------------------------------------

    @property
    def _me(self) -> str:
        return f"{self._us.name} rank {self._us.rank}"

    @torch.no_grad()
    def _check(self, when: str) -> None:
        """Compare every element of the destination with the source's, tensor by tensor, without the library.

        The source's ranks put each tensor together with torch's own ``full_tensor``; rank 0 broadcasts it; each
        destination rank compares its views bit for bit. Nobody holds more than one whole tensor at a time.
        """
        self._us.say("comparing every element with the source's", together=True)
        by_name: dict[str, list[WantedView]] = {}
        for wanted in self._views:
            by_name.setdefault(wanted[0], []).append(wanted)
        tensors = {} if self._trainer is None else self._trainer.tensors()
        for name, shape in self._shapes(tensors):
            full = tensors[name].full_tensor() if tensors else torch.empty(shape, dtype=torch.bfloat16)
            self._group.broadcast(full, 0).wait(self._us.timeout)
            for _, _, start, view in by_name.pop(name, ()):
                here = full[tuple(slice(lo, lo + n) for lo, n in zip(start, view.shape, strict=True))]
                wrong = int((view.view(torch.int16) != here.view(torch.int16)).sum())
                if wrong:
                    self._mismatches.append(f"{self._me}: {wrong:,} elements of {name!r} {when}")
        self._mismatches += [f"{self._me}: {name!r} has no source {when}" for name in by_name]

    def _shapes(self, tensors: Mapping[str, torch.Tensor]) -> list[tuple[str, tuple[int, ...]]]:
        """All tensors of the source, told by its first rank: also those that no view here wants."""
        if self._us.all_rank == 0:
            self._us.store.set("shapes", json.dumps([(name, list(tensor.shape)) for name, tensor in tensors.items()]))
        self._us.store.wait(["shapes"], self._us.timeout)
        return [(name, tuple(shape)) for name, shape in json.loads(self._us.store.get("shapes"))]

    def _content(self) -> str:
        """SHA-256 of all that this rank wants, padding left out."""
        content = hashlib.sha256()
        for _, _, _, view in self._views:
            content.update(view.contiguous().view(torch.uint8).numpy().data)
        return content.hexdigest()

    # -- what came out ---------------------------------------------------------------------------------------------

    def facts(self, holds: int) -> dict[str, Any]:
        plan = self._plan
        me = self._us.all_rank
        report = self._refits[0][1]
        return {
            "facts": RankFacts(
                world=self._us.name,
                rank=self._us.rank,
                holds=holds,
                staging=report.staging_nbytes,
                sent=plan.sent_nbytes().get(me, 0),
                received=plan.received_nbytes().get(me, 0),
                links=tuple(report.links.items()),
            ),
            "refits": [seconds for seconds, _ in self._refits],
            "landed": [report.received_nbytes for _, report in self._refits],
            "seconds": {name: statistics.median(times) for name, times in self._seconds.items()},
            "compile_seconds": self._compile_seconds,
            "entered": self._entered,
            "distinct_nbytes": sum(spec.nbytes for spec in plan.specs),
            "mismatches": self._mismatches,
            "plan": plan.summary(),
        }
