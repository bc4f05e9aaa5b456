"""CompiledRefit: one plan, agreed by all ranks of a group and bound to their memory, to be run again and again."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any

from reshard.errors import (
    BindingError,
    DigestError,
    ReshardError,
    ScheduleError,
    TransportError,
)
from reshard.layouts.manifest import find_rebound
from reshard.refit.agreement import Agreed, or_tell_peers
from reshard.refit.landing import Copies
from reshard.refit.loans import Loans
from reshard.refit.whole import path_text
from reshard.transports.base import Deadline
from reshard.transports.operations import Link
from reshard.transports.program import Program
from reshard.transports.staging import staging_need
from reshard.transports.views import BoundMemory
from reshard.units import format_nbytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import torch.distributed as dist

    from reshard.layouts.bound import BoundPiece
    from reshard.layouts.box import Box
    from reshard.refit.declared import Declared
    from reshard.refit.group import Group
    from reshard.schedule.schedule import Schedule
    from reshard.transports.recorder import Recorder


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
            self._sources = self._copies.of_sources(agreed)
            self._targets = self._copies.of_targets(agreed)
            self._loans = Loans(
                group.rank,
                self.plan,
                links,
                self._sources,
                clashing=self._copies.clashing,
                cast={name for name, side in agreed.cast_at.items() if side == "source"},
                verify=agreed.options.verify != "none",
            )
            offer = {"digest": schedule.digest, **self._loans.offer()}
        told = [json.loads(v) for v in group.meeting.exchange("memory", json.dumps(offer).encode(), deadline)]
        self._check_digests(told)
        with or_tell_peers(group, "ready"):
            self._loans.match(told)
            program = self._compile()
            self._program: Program | None = program
        self.brings_nbytes = program.local_nbytes + program.received_nbytes + program.pulled_nbytes
        """Bytes that land on this rank in one run."""
        group.meeting.exchange("ready", b"", deadline)

    # -- memory ----------------------------------------------------------------------------------------------------

    def _check_digests(self, told: Sequence[Mapping[str, Any]]) -> None:
        for rank, row in enumerate(told):
            if row["digest"] != told[0]["digest"]:
                raise DigestError(
                    f"Rank {rank} made another plan than rank 0 from the same declarations ({row['digest'][:12]} and "
                    f"{told[0]['digest'][:12]}): their versions of reshard differ. Install one version everywhere.",
                    rank=rank,
                )

    def _compile(self) -> Program:
        options, group = self._options, self.group
        borrowed, lent_to, verify = self._loans.borrowed, self._loans.lent_to, options.verify
        need = staging_need(
            self.schedule,
            group.rank,
            self._links,
            borrowed=borrowed,
            lent_to=lent_to,
            verify=verify,  # type: ignore[arg-type]
            casts=self._agreed.cast_at,
        )
        both_nbytes, limit = need.send_nbytes + need.receive_nbytes, options.staging_nbytes
        if verify != "none" and both_nbytes > limit + 2 * self.schedule.size.depth * 16:
            raise ScheduleError(
                f"verify={verify!r} needs {format_nbytes(both_nbytes)} of staging on rank {group.rank} for the sums of "
                f"{len(self.plan.specs)} tensors; the limit is {format_nbytes(limit)}. Raise "
                f"staging_nbytes to that.{self._agreed.kept_text}",
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
            casts=self._agreed.cast_at,
        )

    def let_go_of_old_staging(self) -> None:
        """Forget what was compiled for staging memory that was replaced since; the next run compiles anew."""
        if self._generation != self.group.generation:
            self._program = None

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
            self._loans.lent_to or self._copies.nbytes
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
            in_place = sender in self._loans.borrowed if incoming else peer in self._loans.lent_to
            copies = "read in place, one copy" if in_place else "two copies through staging"
            return f"{transport.name}: {copies}, since rank {sender} said that {self._loans.why[sender]}"
        other = self.group.shm_reason(peer)
        return f"{transport.name}: sent and received" + (f", since {other}" if other else "")

    def run(self, timeout: timedelta | None = None) -> RunReport:
        """Bring the destination to what the source holds now. Every rank of the group calls it.

        Returns:
            What this rank did.

        Raises:
            BindingError: A tensor was rebound in its module, or its memory was freed or moved, since it was compiled.
            PeerError: That happened on another rank.
            DigestError: Another rank runs another refit.
            RefitTimeout: A rank did not call, or did not answer within the deadline; it is named.
            TransportError: A peer was lost. The group cannot be used again.
            VerifyError: Bytes landed that differ from those sent.
        """
        deadline = Deadline.after(timeout or DEFAULT_TIMEOUT)
        started = time.perf_counter()
        with or_tell_peers(self.group, "run"):
            self._check_still_bound()
        self.group.meeting.agree("run", bytes.fromhex(self.schedule.digest), deadline)
        return self.move(deadline, started)

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
        for name, storage, buffer in self._memory:
            if storage.data_ptr() != buffer:
                raise BindingError(
                    f"{name!r}: the memory of rank {self.group.rank} under this name was "
                    f"{'moved' if storage.data_ptr() else 'freed'} since the refit was compiled. Compile the refit "
                    f"again with weights that are there.",
                    tensor=name,
                    rank=self.group.rank,
                )

    @cached_property
    def _memory(self) -> tuple[tuple[str, Any, int], ...]:
        """Each storage that this rank declared, with the first tensor in it and its address then."""
        pieces = [bound for manifest in self._manifests if manifest is not None for bound in manifest.local]
        first = {bound.binding.buffer: bound for bound in reversed(pieces)}
        return tuple((bound.piece.name, bound.view.untyped_storage(), buffer) for buffer, bound in first.items())

    def move(self, deadline: Deadline, started: float) -> RunReport:
        """Move the bytes once all ranks are known to be here.

        Args:
            deadline: For all of it.
            started: When the call began.
        """
        self.let_go_of_old_staging()
        program = self._program = self._program or self._compile()
        agreed = time.perf_counter()
        try:
            self._copies.take()
            program.run(deadline)
        except BaseException as error:
            self._leave_nobody_waiting(error)
            if isinstance(error, TransportError):
                raise type(error)(f"{error.message} {TORN}", **error.facts) from error
            raise
        if self._options.verify != "none":
            self.group.meeting.exchange("verified", b"", deadline)
        if self._options.commit == "in-place":
            self.commit()
        ended = time.perf_counter()
        return RunReport(
            ended - started,
            ended - agreed,
            program.sent_nbytes,
            program.received_nbytes,
            program.pulled_nbytes,
            program.local_nbytes,
            self.group.staging_nbytes + self._copies.nbytes,
            ended - program.account.network_done,
            self.links,
        )

    def _leave_nobody_waiting(self, error: BaseException) -> None:
        """Tell those who wait for this rank's bytes, and those who have all theirs and wait for its word."""
        text = error.message if isinstance(error, ReshardError) else f"{type(error).__name__}: {error}"
        if isinstance(error, TransportError) or not isinstance(error, ReshardError):
            self.group.abort(text)
        if self._options.verify != "none":
            with suppress(ReshardError):  # the first error is the one to raise
                self.group.meeting.fail("verified", text)

    def record(self, recorder: Recorder | None) -> None:
        """Tell ``recorder`` what this rank's runs do from now on, until it is None."""
        self._program = self._program or self._compile()
        self._program.account.recorder = recorder

    def commit(self, names: Iterable[str] | None = None) -> None:
        """Bring what has landed beside the live weights into them; part of ``move`` unless the commit is staged.

        Args:
            names: Some of the destination's tensors; all of them if not given.
        """
        self._copies.put(None if names is None else [at for name in names for at in self._places.get(name, ())])

    @cached_property
    def _places(self) -> dict[str, list[int]]:
        """By destination tensor: where its pieces are among all."""
        places: dict[str, list[int]] = {}
        for at, bound in enumerate(self.live):
            places.setdefault(bound.piece.name, []).append(at)
        return places

    @property
    def sources(self) -> tuple[BoundPiece, ...]:
        """This rank's source pieces as they are read, in whatever dtype they have."""
        return self._sources

    @property
    def cast_at(self) -> Mapping[str, str]:
        """By tensor of the plan that a side holds in another dtype than that in which it travels: which side."""
        return self._agreed.cast_at

    @property
    def made_fingerprints(self) -> dict[int, list[dict[Box, int]]]:
        """Of what the last run cast as it was packed, by the plan's tensors and streams."""
        return {} if self._program is None else self._program.made_fingerprints

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
        """By tensor: whether it goes whole and why, and the rules of the routes that its bytes take."""
        rules: dict[int, set[str]] = {}
        for route in self.plan.routes:
            for pattern, _ in self.plan.classes[route.route_class].parts:
                for tensor in self.plan.patterns[pattern].tensors:
                    rules.setdefault(tensor, set()).add(route.rule)
        names = [self.plan.specs[at].name for at in sorted(rules)]
        found = [sorted(rules[at]) for at in sorted(rules)]
        return {name: path_text(by, self._agreed.whole.get(name, {})) for name, by in zip(names, found, strict=True)}

    @cached_property
    def direct_fraction(self) -> float:
        """The share of the bytes of all tensors, each once, that every destination takes by its pieces."""
        total = sum(spec.nbytes for spec in self.plan.specs)
        direct = sum(spec.nbytes for spec in self.plan.specs if spec.name not in self._agreed.whole)
        return direct / total if total else 1.0

    @property
    def landed_nbytes(self) -> tuple[int, int]:
        """Bytes that have landed here in the run under way, or the last one, and all that one run brings."""
        program = self._program
        return 0 if program is None else program.account.landed_nbytes, self.brings_nbytes

    @property
    def copies_nbytes(self) -> int:
        """Landing room, and copies of sources that would be overwritten, that this refit keeps besides its staging."""
        return self._copies.nbytes


TORN = (
    "The destination's tensors may hold a mix of old and new weights until a refit completes. The connections of this "
    "refit are closed: build a new process group, compile the refit again and run it."
)


__all__ = ["CompiledRefit", "Link", "RunReport"]
