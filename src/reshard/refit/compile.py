"""Compile: from what each rank declares to a transfer that all have agreed on, planned, proved and scheduled."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from reshard.errors import DigestError, ManifestError, ScheduleError
from reshard.plan.plan import plan_refit
from reshard.refit.agreement import agree, or_tell_peers
from reshard.refit.compiled import DEFAULT_TIMEOUT, CompiledRefit
from reshard.refit.declared import Declared
from reshard.refit.group import Group
from reshard.refit.options import make_options
from reshard.schedule.schedule import DEFAULT_STAGING_NBYTES, plan_schedule
from reshard.topology import presets
from reshard.topology.topology import ONE_HOST
from reshard.transports.base import Deadline
from reshard.transports.fabric import fabric_of, share_a_fabric
from reshard.units import format_nbytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import timedelta

    import torch.distributed as dist

    from reshard.layouts.manifest import Manifest
    from reshard.refit.agreement import Agreed
    from reshard.schedule.schedule import Schedule
    from reshard.topology.topology import Topology
    from reshard.transports.operations import Link


def compile_refit(
    group: dist.ProcessGroup | None = None,
    *,
    src: Manifest | None = None,
    dst: Manifest | None = None,
    strategy: str = "reshard",
    transport: str = "auto",
    verify: str = "none",
    staging_nbytes: int | str = DEFAULT_STAGING_NBYTES,
    bucket_nbytes: int | str | None = None,
    depth: int | None = None,
    topology: Topology | None = None,
    timeout: timedelta = DEFAULT_TIMEOUT,
) -> CompiledRefit:
    """Agree on a plan for many tensors over a process group, and compile this rank's part. Every rank calls it.

    Args:
        group: Any torch process group that holds both worlds; the default group if not given.
        src: What this rank holds (``Manifest.from_torch``, ``from_views``); None where it holds nothing.
        dst: Where this rank wants it; None where it wants nothing. A rank may have both. What is compiled keeps the
            memory of both: tensors that the caller lets go of are read and written still.
        strategy: ``"reshard"``, ``"point-to-point"`` or ``"gather-broadcast"``.
        transport: ``"auto"`` (shared memory between ranks of one host, the group elsewhere), ``"torch_p2p"`` or
            ``"shm"``.
        verify: ``"none"``, ``"sum"`` or ``"fingerprint"``: what is compared after every run.
        staging_nbytes: The most staging memory for a rank; the least of all ranks' limits counts.
        bucket_nbytes: Nominal bucket size; chosen from the limit if not given.
        depth: Buckets in flight in each direction.
        topology: What joins the ranks, equal on every rank. If not given, ranks that share memory count as one host,
            and all hosts' ports as equally fast.
        timeout: For all ranks to come and agree.

    Raises:
        ManifestError, LayoutError, CoverageError, ScheduleError: What does not fit, on every rank, before any byte.
        DigestError: The ranks chose different options.
        RefitTimeout: A rank did not come; it is named.
    """
    state, deadline = Group.of(group, timeout), Deadline.after(timeout)
    with or_tell_peers(state, "declare"):
        options = make_options(
            strategy=strategy,
            transport=transport,
            verify=verify,
            staging_nbytes=staging_nbytes,
            bucket_nbytes=bucket_nbytes,
            depth=depth,
        )
    compiled = compile_declared(state, Declared(src, dst, options), topology, deadline)
    compiled.process_group = state.process_group  # connections end with the caller's group, so keep that one
    return compiled


def compile_declared(group: Group, declared: Declared, topology: Topology | None, deadline: Deadline) -> CompiledRefit:
    """As ``compile_refit``, from what this rank declared, nothing of it whole."""
    (compiled,) = compile_windows(group, declared, topology, deadline)
    return compiled


def compile_windows(
    group: Group, declared: Declared, topology: Topology | None, deadline: Deadline
) -> tuple[CompiledRefit, ...]:
    """As ``compile_declared``, one for each part that moves while the room for whole tensors is its own."""
    agreed = agree(group, declared, deadline)
    options = agreed.options
    with or_tell_peers(group, "links"):
        links = group.links(options.transport, agreed.device, deadline)
    looked = options.transport != "torch_p2p" and agreed.device.type == "cpu"
    fabric = fabric_of(agreed.device)
    joined = _agree_on_topology(group, links if looked else {}, fabric, topology, deadline)
    compiled: list[CompiledRefit] = []
    for part in agreed.parts:
        compiled.append(CompiledRefit(group, declared, part, _plan(part, joined), links, deadline))
        for earlier in compiled:
            earlier.let_go_of_old_staging()
    return tuple(compiled)


def _plan(agreed: Agreed, topology: Topology | None) -> Schedule:
    options = agreed.options
    plan = plan_refit(agreed.src, agreed.dst, topology, strategy=options.strategy)
    if plan.needed_nbytes == 0 and any(spec.nbytes for spec in plan.specs):
        spec = next(spec for spec in plan.specs if spec.nbytes)
        raise ManifestError(
            f"The destination declares {spec.name!r} ({format_nbytes(spec.nbytes)}), but none of its ranks wants an "
            f"element of it or of any other tensor, so the refit would move nothing. Check the pieces that are wanted.",
            tensor=spec.name,
        )
    plan.proof()
    try:
        return plan_schedule(
            plan, staging_nbytes=options.staging_nbytes, bucket_nbytes=options.bucket_nbytes, depth=options.depth
        )
    except ScheduleError as error:
        raise type(error)(f"{error.message}{agreed.kept_text}", **error.facts) from None


def _agree_on_topology(
    group: Group, links: Mapping[int, Link], fabric: str | None, given: Topology | None, deadline: Deadline
) -> Topology | None:
    """The topology that all ranks were given; without one, hosts as ranks that share memory found each other, or GPUs
    that share a fabric.

    ``links`` are empty where nobody looked for shared memory, ``fabric`` is None where there is no GPU.

    Raises:
        DigestError: Ranks were given different topologies.
    """
    shared = sorted(peer for peer, link in links.items() if link.transport.lends)
    mine = None if given is None else json.dumps(given.to_json(), sort_keys=True)
    payload = json.dumps([mine, shared, bool(links), fabric]).encode()
    told = [json.loads(value) for value in group.meeting.exchange("links", payload, deadline)]
    for rank, (theirs, *_) in enumerate(told):
        if theirs != told[0][0]:
            raise DigestError(
                f"Rank 0 was given {_called(told[0][0])} and rank {rank} {_called(theirs)}. All ranks of a refit are "
                f"given the same topology.",
                rank=rank,
            )
    if all(len(peers) == group.size - 1 for _, peers, _, _ in told):
        group.use_board(deadline)
    if given is not None:
        return given
    domains = share_a_fabric([label for *_, label in told])
    if domains is not None:
        return presets.gpus(domains)
    if not all(looked for _, _, looked, _ in told):
        return None
    hosts = find_hosts([set(peers) for _, peers, _, _ in told])
    return ONE_HOST if len(hosts) == 1 else presets.hosts(hosts, port_bytes_per_second=GUESSED_PORT)


GUESSED_PORT = 10**9
"""Bytes a second of a host's port where nobody says: only the ratio between hosts matters, and it is taken as 1."""


def _called(topology: str | None) -> str:
    return "no topology" if topology is None else f"topology {json.loads(topology)['name']!r}"


def find_hosts(reached: Sequence[set[int]]) -> list[list[int]]:
    """Ranks that reach each other through shared memory, together; each rank once.

    >>> find_hosts([{1}, {0}, set()])
    [[0, 1], [2]]
    """
    hosts: list[list[int]] = []
    for rank, peers in enumerate(reached):
        home = next((h for h in hosts if all(o in peers and rank in reached[o] for o in h)), None)
        if home is None:
            hosts.append([rank])
        else:
            home.append(rank)
    return hosts


__all__ = ["compile_declared", "compile_refit", "compile_windows"]
