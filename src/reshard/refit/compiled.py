"""CompiledRefit: one plan, agreed by all ranks of a group and bound to their memory, to be run again and again."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from reshard.errors import (
    BindingError,
    ConfigError,
    DigestError,
    ManifestError,
    ReshardError,
    ScheduleError,
    TransportError,
)
from reshard.layouts.box import Box
from reshard.layouts.manifest import BoundPiece, binding_of, find_rebound
from reshard.layouts.piece import Piece
from reshard.plan.plan import STRATEGIES, plan_refit
from reshard.refit.agreement import Agreed, Declared, Options, agree, or_tell_peers
from reshard.refit.group import CHOICES, Group
from reshard.refit.landing import Copies
from reshard.schedule.schedule import DEFAULT_STAGING_NBYTES, Schedule, plan_schedule
from reshard.topology import presets
from reshard.topology.topology import ONE_HOST
from reshard.transports.base import Deadline, Loan
from reshard.transports.fabric import fabric_of, share_a_fabric
from reshard.transports.program import Link, Program, staging_need
from reshard.transports.verify import VERIFY
from reshard.transports.views import BoundMemory
from reshard.units import format_nbytes, parse_nbytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch.distributed as dist

    from reshard.layouts.manifest import Manifest
    from reshard.topology.topology import Topology

DEFAULT_TIMEOUT = timedelta(seconds=60)


@dataclass(frozen=True)
class RunReport:
    """What one rank did in one run. Bytes count payload."""

    seconds: float
    """From the call to the last byte of this rank, the wait for the others to call included."""

    move_seconds: float
    """The same without the wait for the others to call."""

    sent_nbytes: int
    received_nbytes: int
    read_in_place_nbytes: int
    """Read by this rank out of another's shared memory, in one copy."""

    local_nbytes: int
    staging_nbytes: int
    after_network_seconds: float = 0.0
    """From the last bucket that came over the network, where there are several domains, to this rank's last byte."""

    links: Mapping[int, str] = field(default_factory=dict)
    """By peer: the transport, how many copies the bytes take, and why."""

    @property
    def wire_nbytes(self) -> int:
        """Bytes that reached this rank from others, over whatever link."""
        return self.received_nbytes + self.read_in_place_nbytes


class CompiledRefit:
    """A transfer that all ranks of a group have agreed on; ``run`` carries it out.

    Made by ``compile_refit``. Between runs nothing is allocated and nothing is exchanged but one small message a rank.
    """

    def __init__(
        self,
        group: Group,
        declared: Declared,
        agreed: Agreed,
        schedule: Schedule,
        links: Mapping[int, Link],
        deadline: Deadline,
    ) -> None:
        self.group = group
        self.process_group: dist.ProcessGroup | None = None
        self._manifests = (declared.src, declared.dst)
        self.plan = schedule.plan
        self.schedule = schedule
        self.not_covered = agreed.not_covered
        self._options = agreed.options
        self.casts = agreed.casts
        self._copies = Copies(agreed.options.commit == "staged")
        self._agreed = agreed
        self._src_pieces = agreed.src_pieces
        self._dst_pieces = agreed.dst_pieces
        self._bound_to = tuple(bound.binding for bound in (*agreed.src_pieces, *agreed.dst_pieces))
        with or_tell_peers(group, "memory"):
            self._device = agreed.device
            self._p2p = group.p2p(self._device, deadline)
            self._links = links
            shared = any(link.transport.lends for link in links.values())
            self._sources = self._copies.of_sources(agreed, shared=shared)
            self._targets = self._copies.of_targets(agreed)
            offer = self._offer()
        told = [json.loads(v) for v in group.meeting.exchange("memory", json.dumps(offer).encode(), deadline)]
        self._check_digests(told)
        self._why = {rank: row["why"] for rank, row in enumerate(told)}
        with or_tell_peers(group, "ready"):
            self._borrowed, self._lent_to = self._match_loans(told)
            self._program = self._compile()
        group.meeting.exchange("ready", b"", deadline)

    # -- memory ----------------------------------------------------------------------------------------------------

    def _offer(self) -> dict[str, Any]:
        """What this rank tells the others: its digest, whom it reaches in shared memory, and what it lends."""
        shared = sorted(peer for peer, link in self._links.items() if link.transport.lends)
        loans, why = self._lend(shared)
        return {"digest": self.schedule.digest, "shared": shared, "loans": loans, "why": why}

    def _lend(self, shared: Sequence[int]) -> tuple[list[Any] | None, str]:
        if not shared:
            return None, "no rank shares memory with it"
        if not self._sources:
            return None, "it has no source tensor"
        if self.plan.strategy == "gather-broadcast":
            return None, "whole tensors are landed first and cut afterwards"
        if self._copies.clashing:
            return None, "its source and destination share memory"
        private = next((b for b in self._sources if not b.view.is_shared()), None)
        if private is not None:
            return None, f"its {private.piece.name!r} lies in private memory (share_memory_ moves it)"
        transport = self._links[shared[0]].transport
        loans = transport.lend([bound.view for bound in self._sources])
        rows = [
            [b.piece.name, list(b.piece.box.start), list(b.piece.box.stop), loan.to_json(), *_geometry(b)]
            for b, loan in zip(self._sources, loans, strict=True)
        ]
        return rows, "its weights lie in shared memory"

    def _check_digests(self, told: Sequence[Mapping[str, Any]]) -> None:
        for rank, row in enumerate(told):
            if row["digest"] != told[0]["digest"]:
                raise DigestError(
                    f"Rank {rank} made another plan than rank 0 from the same declarations ({row['digest'][:12]} and "
                    f"{told[0]['digest'][:12]}): their versions of reshard differ. Install one version everywhere.",
                    rank=rank,
                )

    def _match_loans(self, told: Sequence[Mapping[str, Any]]) -> tuple[dict[int, BoundMemory], tuple[int, ...]]:
        """Whose memory this rank reads in place, and who reads its own: those that see each other on an edge."""
        me = self.group.rank
        borrowed, lent_to = {}, []
        for sender, receiver in sorted(self._pairs_in_place()):
            if told[sender]["loans"] is None or receiver not in told[sender]["shared"]:
                continue
            if sender not in told[receiver]["shared"]:
                continue
            if sender == me:
                lent_to.append(receiver)
            elif receiver == me:
                borrowed[sender] = self._borrow(sender, told[sender]["loans"])
        return borrowed, tuple(sorted(lent_to))

    def _pairs_in_place(self) -> set[tuple[int, int]]:
        """The pairs whose receiver may read the sender's weights where they lie, if these are lent.

        The sender holds the bytes as a source, and the receiver hands none of them on: it would have to read first.
        """
        pairs: set[tuple[int, int]] = set()
        handed_on: set[tuple[int, int]] = set()
        for route in self.plan.routes:
            senders = {sender for sender, _ in route.edges}
            for sender, receiver in route.edges:
                if sender != receiver and self.plan.classes[route.route_class].holders >> sender & 1:
                    pairs.add((sender, receiver))
                    if receiver in senders:
                        handed_on.add((sender, receiver))
        return pairs - handed_on

    def _borrow(self, sender: int, rows: Sequence[Any]) -> BoundMemory:
        wanted = self._wanted_from[sender]
        pieces = []
        for name, start, stop, loan_json, dtype, shape, strides in rows:
            if name not in wanted:
                continue
            loan = Loan.from_json(loan_json)
            memory = self._links[sender].transport.borrow(self._links[sender].peer, loan)
            view = torch.empty(0, dtype=getattr(torch, dtype)).set_(
                memory.untyped_storage(),
                loan.offset_nbytes // getattr(torch, dtype).itemsize,
                tuple(shape),
                tuple(strides),
            )
            pieces.append(BoundPiece(Piece(name, Box(tuple(start), tuple(stop))), binding_of(view), view))
        return BoundMemory(pieces)

    @cached_property
    def _wanted_from(self) -> dict[int, set[str]]:
        """By sender: the names of the tensors that this rank receives a part of."""
        wanted: dict[int, set[str]] = {}
        for sender, tensor, _ in self.plan.for_rank(self.group.rank).receives:
            wanted.setdefault(sender, set()).add(self.plan.specs[tensor].name)
        return wanted

    def _compile(self) -> Program:
        options, group = self._options, self.group
        borrowed, lent_to, verify = self._borrowed, self._lent_to, options.verify
        need = staging_need(
            self.schedule,
            group.rank,
            self._links,
            borrowed=borrowed,
            lent_to=lent_to,
            verify=verify,  # type: ignore[arg-type]
        )
        both_nbytes, limit = need.send_nbytes + need.receive_nbytes, options.staging_nbytes
        if verify != "none" and both_nbytes > limit + 2 * self.schedule.size.depth * 16:
            raise ScheduleError(
                f"verify={verify!r} needs {format_nbytes(both_nbytes)} of staging on rank {group.rank} for the sums of "
                f"{len(self.plan.specs)} tensors; the limit is {format_nbytes(limit)}. Raise staging_nbytes to that.",
                rank=group.rank,
            )
        shared = [link.transport for link in self._links.values() if link.transport.sends_from == "staging"]
        # one arena, from which every link can send: what comes in over the network is handed on from where it landed
        arena = group.arena(shared[0] if shared else self._p2p, both_nbytes)
        send_arena = None if arena is None else arena[: need.send_nbytes]
        receive_arena = None if arena is None else arena[need.send_nbytes : both_nbytes]
        self._generation = group.generation
        return Program(
            self.schedule,
            group.rank,
            BoundMemory(self._sources),
            BoundMemory(self._targets),
            self._links,
            borrowed=borrowed,
            lent_to=lent_to,
            send_arena=send_arena,
            receive_arena=receive_arena,
            device=self._device,
            verify=verify,  # type: ignore[arg-type]
        )

    def rebind(self, declared: Declared) -> None:
        """Bind this rank's part to the memory that ``declared`` names, of the same shapes; nothing is exchanged.

        Raises:
            BindingError: Others read this rank's source memory in place, and it is another one now.
        """
        src, dst = self._agreed.bind(declared)
        key = tuple(bound.binding for bound in (*src, *dst))
        if key == self._bound_to:
            return
        if any(a.binding != b.binding for a, b in zip(src, self._src_pieces, strict=True)) and (
            self._lent_to or self._copies.nbytes
        ):
            raise BindingError(
                f"Rank {self.group.rank}: the source memory that other ranks read in place has moved since the refit "
                f"was compiled. Compile it again.",
                rank=self.group.rank,
            )
        if not self._copies.nbytes:
            self._sources, self._targets = src, dst
        self._src_pieces, self._dst_pieces, self._bound_to = src, dst, key
        self._program = self._compile()

    # -- running ---------------------------------------------------------------------------------------------------

    @cached_property
    def links(self) -> dict[int, str]:
        """By peer that this rank exchanges bytes with: transport, copies and the reason."""
        described = {}
        for sender, receiver in self.plan.pair_nbytes():
            if self.group.rank not in (sender, receiver):
                continue
            peer = receiver if sender == self.group.rank else sender
            described[peer] = self._describe(sender, peer, receiver == self.group.rank)
        return dict(sorted(described.items()))

    def _describe(self, sender: int, peer: int, incoming: bool) -> str:
        transport = self._links[peer].transport
        if transport.lends:
            in_place = sender in self._borrowed if incoming else peer in self._lent_to
            copies = "read in place, one copy" if in_place else "two copies through staging"
            return f"{transport.name}: {copies}, since rank {sender} said that {self._why[sender]}"
        other = self.group.shm_reason(peer)
        return f"{transport.name}: sent and received" + (f", since {other}" if other else "")

    def run(self, timeout: timedelta | None = None) -> RunReport:
        """Bring the destination to what the source holds now. Every rank of the group calls it.

        Returns:
            What this rank did.

        Raises:
            DigestError: Another rank runs another refit.
            RefitTimeout: A rank did not call, or did not answer within the deadline; it is named.
            TransportError: A peer was lost. The group cannot be used again.
            VerifyError: Bytes landed that differ from those sent.
        """
        deadline = Deadline.after(timeout or DEFAULT_TIMEOUT)
        started = time.perf_counter()
        with or_tell_peers(self.group, "run"):
            self._check_still_bound()
            self._copies.take()  # before anybody can know that all are here, and read them in place
        self.group.meeting.agree("run", bytes.fromhex(self.schedule.digest), deadline)
        return self.move(deadline, started, taken=True)

    def _check_still_bound(self) -> None:
        for manifest in self._manifests:
            name = None if manifest is None else find_rebound(manifest)
            if name is not None:
                raise BindingError(
                    f"{name!r}: the module of rank {self.group.rank} holds another tensor under this name than when "
                    f"the refit was compiled, so the bytes would go to memory that nobody reads. Compile the refit "
                    f"again, or update parameters in place (param.data.copy_).",
                    tensor=name,
                    rank=self.group.rank,
                )

    def move(self, deadline: Deadline, started: float, *, taken: bool = False) -> RunReport:
        """Move the bytes once all ranks are known to be here.

        Args:
            deadline: For all of it.
            started: When the call began.
            taken: Whether ``take`` was called for it, before the ranks met. Copies that others read in place need that.
        """
        if self._generation != self.group.generation:
            self._program = self._compile()
        agreed = time.perf_counter()
        try:
            if not taken:
                self._copies.take()
            self._program.run(deadline)
        except TransportError as error:
            self.group.abort(error.message)
            raise type(error)(f"{error.message} {TORN}", **error.facts) from error
        except ReshardError as error:
            if self._options.verify != "none":
                self.group.meeting.fail("verified", error.message)
            raise
        if self._options.verify != "none":
            self.group.meeting.exchange("verified", b"", deadline)
        if self._options.commit == "in-place":
            self.commit()
        ended = time.perf_counter()
        program = self._program
        return RunReport(
            ended - started,
            ended - agreed,
            program.sent_nbytes,
            program.received_nbytes,
            program.pulled_nbytes,
            program.local_nbytes,
            self.group.staging_nbytes + self._copies.nbytes,
            ended - program.network_done,
            self.links,
        )

    def commit(self) -> None:
        """Bring what has landed beside the live weights into them; part of ``move`` unless the commit is staged."""
        self._copies.put()

    @property
    def sources(self) -> tuple[BoundPiece, ...]:
        """This rank's source pieces as others read them: casts and copies, as of the last ``take``."""
        return self._sources

    @property
    def live(self) -> tuple[BoundPiece, ...]:
        """This rank's destination pieces where they are used, under the names that it declared."""
        declared = {wire.name: name for name, wire in self._agreed.local.wanted.items()}
        return tuple(
            replace(b, piece=replace(b.piece, name=declared.get(b.piece.name, b.piece.name))) for b in self._dst_pieces
        )

    @cached_property
    def link_nbytes(self) -> dict[str, int]:
        """Bytes that this rank sends or receives in one run, by kind of link."""
        total: dict[str, int] = {}
        for (sender, receiver), nbytes in self.plan.pair_nbytes().items():
            if self.group.rank in (sender, receiver):
                kind = self._links[receiver if sender == self.group.rank else sender].transport.name
                total[kind] = total.get(kind, 0) + nbytes
        return total

    @cached_property
    def paths(self) -> dict[str, str]:
        """By tensor: the rules of the routes that its bytes take."""
        rules: dict[int, set[str]] = {}
        for route in self.plan.routes:
            for pattern, _ in self.plan.classes[route.route_class].parts:
                for tensor in self.plan.patterns[pattern].tensors:
                    rules.setdefault(tensor, set()).add(route.rule)
        return {self.plan.specs[at].name: ", ".join(sorted(found)) for at, found in sorted(rules.items())}

    def take(self) -> None:
        """Bring the casts and copies of this rank's source up to date."""
        self._copies.take()

    @property
    def copies_nbytes(self) -> int:
        """Memory of casts, copies, and landing room, that this refit keeps besides its staging."""
        return self._copies.nbytes


TORN = (
    "The destination's tensors may hold a mix of old and new weights until a refit completes. The connections of this "
    "refit are closed: build a new process group, compile the refit again and run it."
)


def _geometry(bound: BoundPiece) -> tuple[str, list[int], list[int]]:
    view = bound.view
    return str(view.dtype).removeprefix("torch."), list(view.shape), list(view.stride())


def make_options(
    *,
    strategy: str,
    transport: str,
    verify: str,
    staging_nbytes: int | str,
    bucket_nbytes: int | str | None = None,
    depth: int | None = None,
    casts: bool = False,
    commit: str = "in-place",
) -> Options:
    """Check the options of a refit.

    Raises:
        ConfigError: An unknown name, or a size that cannot be read.
    """
    for name, value, known in (
        ("strategy", strategy, STRATEGIES),
        ("transport", transport, CHOICES),
        ("verify", verify, VERIFY),
    ):
        if value not in known:
            raise ConfigError(f"{name}={value!r} is unknown; use one of {', '.join(known)}.")
    bucket = None if bucket_nbytes is None else parse_nbytes(bucket_nbytes)
    return Options(strategy, transport, verify, parse_nbytes(staging_nbytes), bucket, depth, casts, commit)


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
        dst: Where this rank wants it; None where it wants nothing. A rank may have both.
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
    """As ``compile_refit``, from what this rank declared."""
    agreed = agree(group, declared, deadline)
    options = agreed.options
    with or_tell_peers(group, "links"):
        links = group.links(options.transport, agreed.device, deadline)
    looked = options.transport != "torch_p2p" and agreed.device.type == "cpu"
    fabric = fabric_of(agreed.device)
    joined = _agree_on_topology(group, links if looked else {}, fabric, topology, deadline)
    plan = plan_refit(agreed.src, agreed.dst, joined, strategy=options.strategy)
    if plan.needed_nbytes == 0 and any(spec.nbytes for spec in plan.specs):
        spec = next(spec for spec in plan.specs if spec.nbytes)
        raise ManifestError(
            f"The destination declares {spec.name!r} ({format_nbytes(spec.nbytes)}), but none of its ranks wants an "
            f"element of it or of any other tensor, so the refit would move nothing. Check the pieces that are wanted.",
            tensor=spec.name,
        )
    plan.proof()
    schedule = plan_schedule(
        plan, staging_nbytes=options.staging_nbytes, bucket_nbytes=options.bucket_nbytes, depth=options.depth
    )
    return CompiledRefit(group, declared, agreed, schedule, links, deadline)


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


__all__ = ["CompiledRefit", "Link", "RunReport", "compile_declared", "compile_refit", "make_options"]
