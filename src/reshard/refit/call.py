"""Call: what a session was opened with, what one call of ``refit`` asks for and finds out, and the report of it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from reshard.refit import fingerprints
from reshard.refit.report import RefitReport

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    from reshard.refit.agreement import Options
    from reshard.refit.compiled import CompiledRefit, RunReport
    from reshard.refit.fleet import Request
    from reshard.refit.gate import Gate
    from reshard.refit.group import Group
    from reshard.refit.machine import State
    from reshard.refit.membership import Comer
    from reshard.refit.offers import Offer
    from reshard.topology.topology import Topology
    from reshard.transports.base import Deadline


@dataclass(frozen=True)
class Setup:
    """What a session was opened with."""

    session: str
    store: str | dist.Store
    me: Comer
    expect: Mapping[str, int]
    options: Options
    device: torch.device
    timeout: timedelta
    topology: Topology | None


@dataclass(frozen=True)
class Asked:
    """One call of ``refit``."""

    version: int
    to: tuple[str, ...]
    names: tuple[str, ...] | None
    allow_rollback: bool
    offer: Offer | None
    """What this rank brings: what it offers, or accepts."""


@dataclass
class Scope:
    """The members of the source and of some destination worlds, joined for their refits in one epoch."""

    members: tuple[str, ...]
    rank: int
    gate: Gate
    process_group: dist.ProcessGroup
    group: Group
    compiled: dict[tuple[str, ...] | None, CompiledRefit] = field(default_factory=dict)


@dataclass
class Current:
    """What the refit under way has found out so far."""

    asked: Asked
    deadline: Deadline
    started: float
    phases: dict[str, float] = field(default_factory=dict)
    scope: Scope | None = None
    requests: tuple[Request, ...] = ()
    compiled: CompiledRefit | None = None
    moved: RunReport | None = None
    prints: dict[str, int] | None = None
    unchanged: tuple[str, ...] | None = None
    report: RefitReport | None = None


def make_report(setup: Setup, state: State, current: Current) -> RefitReport:
    """What this rank says of a refit that completed."""
    compiled, moved = current.compiled, current.moved
    assert compiled is not None
    assert moved is not None
    assert current.scope is not None
    writes = setup.me.role == "destination"
    asked, scope, plan = current.asked, current.scope, compiled.plan
    names = [spec.name for spec in plan.specs]
    mine = () if asked.offer is None or not writes else asked.offer.manifest.names
    refitted = {bound.piece.name for bound in compiled.live}
    given = setup.topology is not None
    bound = float(plan.bound.seconds) if given else None
    return RefitReport(
        session=setup.session,
        member=str(setup.me.member),
        version=asked.version,
        epoch=state.epoch,
        to=asked.to,
        seconds=time.perf_counter() - current.started,
        phases=dict(current.phases),
        commit=setup.options.commit,
        verify=setup.options.verify,
        partial=state.serving.partial if writes else asked.names is not None,
        tensors=len(names),
        untouched=sum(1 for name in mine if name not in refitted) if asked.names is not None else 0,
        sent_nbytes=moved.sent_nbytes,
        received_nbytes=moved.wire_nbytes,
        local_nbytes=moved.local_nbytes,
        link_nbytes=compiled.link_nbytes,
        links={scope.members[peer]: link for peer, link in moved.links.items()},
        staging_nbytes=moved.staging_nbytes,
        copies_nbytes=compiled.copies_nbytes,
        paths=compiled.paths,
        casts=compiled.casts,
        renamed={} if asked.offer is None else asked.offer.renamed,
        left_out=() if asked.offer is None else asked.offer.left_out,
        not_covered=compiled.not_covered,
        unchanged=current.unchanged,
        bound_seconds=bound,
        bound_fraction=float(plan.reach.busiest_seconds / plan.bound.seconds) if bound else None,
        digest=fingerprints.digest(current.prints) if current.prints is not None else "",
    )
