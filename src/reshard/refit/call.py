"""Call: what a session was opened with, what one call of ``refit`` asks for and finds out, and the report of it."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from reshard.errors import ConfigError
from reshard.refit import fingerprints
from reshard.refit.declared import Declared
from reshard.refit.names import matching
from reshard.refit.options import whole_number
from reshard.refit.report import RefitReport

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    from reshard.refit.compiled import RunReport
    from reshard.refit.engines import Engines
    from reshard.refit.fleet import Request
    from reshard.refit.gate import Gate
    from reshard.refit.group import Group
    from reshard.refit.install import Installation
    from reshard.refit.machine import State
    from reshard.refit.membership import Comer
    from reshard.refit.offers import Offer
    from reshard.refit.options import Options
    from reshard.refit.windowed import WindowedRefit
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
    engines: Engines | None = None
    lands_on: torch.device | None = None
    """Where bytes land beside the live weights; on their device if not given."""

    @property
    def room_on(self) -> torch.device:
        """Where the session gives room to land in."""
        return self.device if self.lands_on is None else self.lands_on


@dataclass(frozen=True)
class Asked:
    """One call of ``refit``."""

    version: int
    to: tuple[str, ...]
    names: tuple[str, ...] | None
    allow_rollback: bool
    offer: Offer | None
    """What this rank brings: what it offers, or accepts."""


def make_asked(
    me: Comer,
    worlds: Sequence[str],
    offer: Offer | None,
    *,
    version: int,
    names: Sequence[str] | str | None,
    to: Sequence[str] | str | None,
    allow_rollback: bool,
) -> Asked:
    """Read the arguments of one call.

    Args:
        me: Who calls.
        worlds: The destination worlds.
        offer: What this rank brings.
        version: As given.
        names: As given.
        to: As given.
        allow_rollback: As given.

    Raises:
        ConfigError: Worlds that are unknown, a call of a rank that has no part in it, or a version that is no count.
    """
    others = sorted(worlds)
    chosen = others if to is None else sorted(set(_texts("to", to)))
    unknown = [world for world in chosen if world not in others]
    if unknown or not chosen:
        raise ConfigError(
            f"to={list(_texts('to', to or ()))!r}: destination worlds are {', '.join(map(repr, others))}; name some."
        )
    if me.role == "destination" and me.world not in chosen:
        raise ConfigError(
            f"World {me.world!r} has no part in a refit to {', '.join(map(repr, chosen))}; only the source and the "
            f"worlds named call it."
        )
    version = whole_number("version", version)
    if version < 0:
        raise ConfigError(f"version={version}: versions count from 0.")
    patterns = None if names is None else _texts("names", names)
    if patterns == ():
        raise ConfigError(f"names={names!r} names no tensor. Leave it out to bring all of them.")
    return Asked(version, tuple(chosen), patterns, allow_rollback, offer)


def declare(setup: Setup, asked: Asked) -> Declared:
    """What this rank brings to one refit: all that it offers or accepts, or what the call names of it."""
    offer, names = asked.offer, asked.names
    assert offer is not None
    manifest = offer.manifest if names is None else offer.manifest.select(matching(offer.manifest.names, names))
    src, dst = (None, manifest) if setup.me.role == "destination" else (manifest, None)
    here, loaders = set(manifest.names), offer.hooks.loaders or {}
    whole = {one.name: one.reason for one in offer.whole if one.name in here}
    loaded = tuple(name for name in whole if name in loaders)
    me = setup.me
    return Declared(src, dst, setup.options, me.world, me.rank, offer.rooms, whole, loaded, setup.lands_on)


def _texts(what: str, given: Sequence[str] | str) -> tuple[str, ...]:
    """One text, or several, as a tuple."""
    texts = (given,) if isinstance(given, str) else tuple(given) if isinstance(given, Iterable) else (None,)
    if not all(isinstance(text, str) for text in texts):
        raise ConfigError(f"{what}={given!r}: give one text, or a list of texts.")
    return texts


@dataclass
class Scope:
    """The members of the source and of some destination worlds, joined for their refits in one epoch."""

    members: tuple[str, ...]
    rank: int
    gate: Gate
    process_group: dist.ProcessGroup
    group: Group
    compiled: dict[tuple[str, ...] | None, WindowedRefit] = field(default_factory=dict)


@dataclass
class Current:
    """What the refit under way has found out so far."""

    asked: Asked
    deadline: Deadline
    started: float
    phases: dict[str, float] = field(default_factory=dict)
    scope: Scope | None = None
    requests: tuple[Request, ...] = ()
    compiled: WindowedRefit | None = None
    installation: Installation | None = None
    moved: RunReport | None = None
    prints: dict[str, int] | None = None
    unchanged: tuple[str, ...] | None = None
    report: RefitReport | None = None


def make_report(
    setup: Setup,
    state: State,
    current: Current,
    pause_seconds: float | None,
    engine_seconds: Mapping[str, float],
) -> RefitReport:
    """What this rank says of a refit that completed."""
    compiled, moved = current.compiled, current.moved
    assert compiled is not None
    assert moved is not None
    assert current.scope is not None
    writes = setup.me.role == "destination"
    asked, scope = current.asked, current.scope
    mine = () if asked.offer is None or not writes else asked.offer.manifest.names
    refitted = {bound.piece.name for bound in compiled.live}
    given = setup.topology is not None
    room_nbytes = 0 if asked.offer is None else asked.offer.room_nbytes
    bound = compiled.bound_seconds if given else None
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
        tensors=compiled.tensors,
        untouched=sum(1 for name in mine if name not in refitted) if asked.names is not None else 0,
        sent_nbytes=moved.sent_nbytes,
        received_nbytes=moved.wire_nbytes,
        local_nbytes=moved.local_nbytes,
        link_nbytes=compiled.link_nbytes,
        links={scope.members[peer]: link for peer, link in moved.links.items()},
        staging_nbytes=moved.staging_nbytes + room_nbytes,
        copies_nbytes=compiled.copies_nbytes + room_nbytes,
        paths=compiled.paths,
        direct_fraction=compiled.direct_fraction,
        casts=compiled.casts,
        renamed={} if asked.offer is None else asked.offer.renamed,
        left_out=() if asked.offer is None else asked.offer.left_out,
        not_covered=compiled.not_covered,
        unchanged=current.unchanged,
        bound_seconds=bound,
        bound_fraction=compiled.busiest_seconds / bound if bound else None,
        digest=fingerprints.digest(current.prints) if current.prints is not None else "",
        pause_seconds=pause_seconds,
        engine_seconds=dict(engine_seconds),
        copies_into=compiled.copies_into,
        windows=len(compiled.windows),
    )
