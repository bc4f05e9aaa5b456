"""Connect: read and check what a session is opened with, and meet its members."""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

import torch
import torch.distributed as dist

from reshard.errors import ConfigError
from reshard.refit.call import Setup
from reshard.refit.compiled import DEFAULT_TIMEOUT
from reshard.refit.journal import Journal
from reshard.refit.membership import Comer
from reshard.refit.options import check_timeout, make_options, whole_number
from reshard.refit.runner import Runner
from reshard.refit.session import Session
from reshard.refit.store import ServedStore
from reshard.topology.topology import Topology
from reshard.transports.base import Deadline

if TYPE_CHECKING:
    from datetime import timedelta
    from pathlib import Path

    from reshard.refit.engines import Engines
    from reshard.refit.membership import Role

Commit = Literal["staged", "in-place"]
StagedOn = Literal["device", "host"]

_COMMITS = ("staged", "in-place")
_STAGED_ON = ("device", "host")


def connect(
    store: str | ServedStore | dist.Store,
    *,
    role: Role,
    world: str,
    rank: int | None = None,
    world_size: int | None = None,
    expect: Mapping[str, int],
    session: str = "default",
    device: torch.device | str | None = None,
    staging_nbytes: int | str = "512MiB",
    commit: Commit = "staged",
    staged_on: StagedOn = "device",
    verify: str = "sum",
    strategy: str = "reshard",
    transport: str = "auto",
    topology: Topology | None = None,
    routes: Mapping[str, str] | None = None,
    timeout: timedelta = DEFAULT_TIMEOUT,
    events: str | Path | None = None,
    progress: bool = False,
    engines: Engines | None = None,
) -> Session:
    """Join a session: one source world and any number of destination worlds, launched by whatever launched them.

    Every process of every world calls it, in any order. No default process group is needed or touched.

    Args:
        store: Where all meet: the address that ``serve_store`` gave, or any torch store that all share.
        role: ``"source"`` for the world that has the weights, ``"destination"`` for one that needs them.
        world: This world's name.
        rank: This process's number in its world; from torchrun's or Slurm's environment if not given.
        world_size: Processes of this world; from there too. It must be what ``expect`` says.
        expect: Processes of each world, by name; the same on all members.
        session: Several sessions can share a store.
        device: Where the weights lie; the CPU if not given.
        staging_nbytes: The most staging memory of this rank; the least of all ranks' limits counts.
        commit: ``"staged"``: bytes land beside the live weights, which change when all ranks have them (room for one
            copy of this rank's own weights). ``"in-place"``: a failure in between leaves the rank torn.
        staged_on: Where that room is: ``"device"``, beside the weights, or ``"host"``, in page-locked memory of the
            host, for a GPU that has none left. Each rank chooses for itself. On CPUs both are the same, and no GPU has
            run ``"host"``. Hooks and loaders are then handed tensors on the CPU.
        verify: ``"none"``, ``"sum"``, or ``"fingerprint"``, which also keeps what ``Session.verify`` compares with.
        strategy: As ``compile_refit``.
        transport: As ``compile_refit``.
        topology: As ``compile_refit``; ranks count the source world first, then destination worlds by name.
        routes: By pattern of names, ``"direct"`` (the default: each rank receives its pieces) or ``"whole"`` (each rank
            that wants a part receives the tensor whole, once into each domain, and cuts its pieces out of it; in place
            the room for it is a part of ``staging_nbytes``). The first pattern that matches decides; the same on all
            members.
        timeout: For all members to come, and for each later call that is given no other.
        events: A file to which this rank appends its events, one line of JSON each. After a failure the last ones of
            every rank that can be reached are appended to ``<events>.failed``.
        progress: Whether this rank shows one line on stderr while a refit runs: phase, bytes landed, who is waited for.
        engines: Who drives the engines that the destination worlds belong to: tells their processes to join and to
            receive, stops them for the install alone, lets them go on. The first rank of the source calls it; other
            ranks of the source may pass it too.

    Raises:
        ConfigError: An argument that cannot be right.
        MembershipError: Members are missing at the deadline, there twice, or not expected; all are named.
        TransportError: Nobody serves the store.
    """
    _check_expect(expect, world)
    rank = _from_environment("rank", rank, "RANK", "SLURM_PROCID")
    size = _from_environment("world_size", world_size, "WORLD_SIZE", "SLURM_NTASKS", default=expect[world])
    timeout = check_timeout(timeout, DEFAULT_TIMEOUT)
    if role not in ("source", "destination"):
        raise ConfigError(f"role={role!r} is unknown; a world is a 'source' or a 'destination'.")
    if commit not in _COMMITS:
        raise ConfigError(f"commit={commit!r} is unknown; use one of {', '.join(_COMMITS)}.")
    if staged_on not in _STAGED_ON:
        raise ConfigError(f"staged_on={staged_on!r} is unknown; use one of {', '.join(_STAGED_ON)}.")
    if staged_on == "host" and commit != "staged":
        raise ConfigError(
            f"staged_on='host' says where bytes land beside the live weights, and with commit={commit!r} they land in "
            f"the live weights. Leave it out, or use commit='staged'."
        )
    if size != expect[world]:
        raise ConfigError(
            f"World {world!r} has {size} processes here (world_size, or the launcher's environment), and expect= says "
            f"{expect[world]}. Correct one."
        )
    if rank not in range(size):
        raise ConfigError(
            f"rank={rank} (given, or from the launcher's environment) is none of the {size} ranks of world {world!r}, "
            f"which count from 0. Pass rank= where a launcher counts the processes of several worlds."
        )
    options = make_options(
        strategy=strategy,
        transport=transport,
        verify=verify,
        staging_nbytes=staging_nbytes,
        casts=True,
        commit=commit,
        routes=routes,
    )
    if not isinstance(store, str | ServedStore | dist.Store):
        raise ConfigError(f"store={store!r} is no store: give the address that serve_store gave, or a torch store.")
    if not isinstance(session, str):
        raise ConfigError(f"session={session!r} is no name. Give a text; members that give the same one meet.")
    if topology is not None and not isinstance(topology, Topology):
        raise ConfigError(f"topology={topology!r} is no Topology: reshard.topology.presets makes one.")
    me = Comer(world, rank, role, uuid.uuid4().hex, f"{socket.gethostname()} pid {os.getpid()}")
    setup = Setup(
        session,
        str(store) if isinstance(store, str | ServedStore) else store,
        me,
        dict(expect),
        options,
        torch.device(device or "cpu"),
        timeout,
        topology,
        engines,
        torch.device("cpu") if staged_on == "host" else None,
    )
    runner = Runner(setup, Journal(session, str(me.member), events))
    runner.join(Deadline.after(timeout))
    return Session(runner, progress=progress)


def _check_expect(expect: Mapping[str, int], world: str) -> None:
    """Refuse at once what no member could meet over."""
    whole = isinstance(expect, Mapping) and all(isinstance(size, int) and size > 0 for size in expect.values())
    if not whole or len(expect) < 2:
        raise ConfigError(
            f"expect={expect!r} does not say who meets. Name the source world and each destination world with its "
            f"number of processes, as in {{'trainer': 8, 'gen0': 4}}."
        )
    if world not in expect:
        raise ConfigError(f"world={world!r} is none of those that are expected: {', '.join(map(repr, expect))}.")


def _from_environment(what: str, given: int | None, *variables: str, default: int | None = None) -> int:
    """A number that launchers put into the environment."""
    if given is not None:
        return whole_number(what, given)
    for variable in variables:
        if os.environ.get(variable, "").isdigit():
            return int(os.environ[variable])
    if default is not None:
        return default
    raise ConfigError(f"{what}= was not given, and neither {' nor '.join(variables)} is in the environment.")
