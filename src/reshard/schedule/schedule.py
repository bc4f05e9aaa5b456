"""Schedule: a plan with its order in time and its bound on staging memory; a rank's part is a list of operations."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from reshard.schedule.bucket import Bucket, BucketSize, Stream, fill_buckets, make_streams, size_buckets
from reshard.schedule.hops import LAG, Flow, Hop, Ports, flow_rounds
from reshard.schedule.rounds import RoundBlock, busiest, colour_rounds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reshard.plan.plan import Plan
    from reshard.topology.topology import Topology

DEFAULT_STAGING_NBYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Operation:
    """One bucket that this rank sends to, or receives from, a peer.

    ``step`` orders operations inside a round: 0 over the network, then inside the domain. ``forwarded`` says that the
    sender does not hold the bucket's bytes as a source, but hands on what it has received.
    """

    round: int
    step: int
    kind: Literal["send", "recv"]
    peer: int
    bucket: Bucket
    forwarded: bool = False


@dataclass(frozen=True)
class Schedule:
    """Buckets and rounds of a plan, for all ranks; equal on every rank.

    ``size`` says how large buckets are and how many are in flight, which bounds the staging memory of every rank
    whatever the size of the model.
    """

    plan: Plan
    size: BucketSize
    streams: tuple[Stream, ...]
    blocks: tuple[RoundBlock, ...]
    """Rounds in which nothing is forwarded."""

    hops: tuple[Hop, ...] = ()
    """Rounds of a plan over several domains, hop by hop."""

    @cached_property
    def rounds(self) -> int:
        """How many rounds there are."""
        blocks = sum(block.repeat for block in self.blocks)
        steps = self._local_steps
        return blocks + max((hop.when(hop.count - 1, steps)[0] + 1 for hop in self.hops), default=0)

    @cached_property
    def _local_steps(self) -> int:
        return 1 if self.plan.topology.is_flat else local_steps(self.plan.topology)

    @cached_property
    def pair_buckets(self) -> dict[tuple[int, int], int]:
        """How many buckets go over each pair."""
        return _pair_buckets(self.streams, self.size)

    @property
    def least_rounds(self) -> int:
        """What no order can beat: the most buckets that one rank, or one port to the network, sends or receives."""
        if not self.hops:
            return busiest(self.pair_buckets)
        domain_of = self.plan.topology.domain_of
        network = {pair: n for pair, n in self.pair_buckets.items() if domain_of(pair[0]) != domain_of(pair[1])}
        return max(Ports.of(self.plan.topology).least_rounds(network), 1)

    @property
    def early_rounds(self) -> int:
        """How many rounds before its own a bucket may be posted over the network: what it hands on is there by then."""
        return LAG - 1 if self.hops else 0

    @property
    def messages(self) -> int:
        """Buckets on the wire, all pairs together."""
        return sum(self.pair_buckets.values())

    def staging_nbytes(self, rank: int) -> int:
        """The most staging memory that ``rank`` uses."""
        sends = sum(count for (sender, _), count in self.pair_buckets.items() if sender == rank)
        receives = sum(count for (_, receiver), count in self.pair_buckets.items() if receiver == rank)
        return (min(sends, self.size.depth) + min(receives, self.size.depth)) * self.size.slot_nbytes

    @property
    def digest(self) -> str:
        """SHA-256 over the plan's digest and the bucket sizes: what ranks compare before any payload byte."""
        text = f"{self.plan.digest} {self.size}"
        return hashlib.sha256(text.encode()).hexdigest()

    @cached_property
    def _filled(self) -> dict[int, list[Bucket]]:
        return {}

    def buckets(self, stream: int) -> list[Bucket]:
        """The buckets of a stream, expanded."""
        if stream not in self._filled:
            self._filled[stream] = fill_buckets(self.plan, stream, self.streams, self.size)
        return self._filled[stream]

    def pair_sequence(self, sender: int, receiver: int) -> list[Bucket]:
        """What goes over a pair, in order: by the first tensor of each bucket, so that early tensors land early."""
        mine = [
            bucket
            for at, stream in enumerate(self.streams)
            if (sender, receiver) in stream.edges
            for bucket in self.buckets(at)
        ]
        return sorted(mine, key=lambda bucket: (bucket.items[0][0], bucket.stream, bucket.index))

    def for_rank(self, rank: int) -> tuple[Operation, ...]:
        """The operations of ``rank`` by round, at most one send and one receive in each.

        The send comes first: two ranks that exchange buckets in one round would otherwise wait for each other.
        """
        waiting: dict[tuple[int, int], list[Bucket]] = {}
        operations: list[Operation] = self._operations_of_hops(rank)
        mine = [[pair for pair in block.pairs if rank in pair] for block in self.blocks]
        for number, at in enumerate(self._block_of_round):
            for pair in mine[at]:
                if pair not in waiting:
                    waiting[pair] = self.pair_sequence(*pair)[::-1]
                kind: Literal["send", "recv"] = "send" if pair[0] == rank else "recv"
                peer = pair[1] if kind == "send" else pair[0]
                operations.append(Operation(number, 0, kind, peer, waiting[pair].pop()))
        return tuple(sorted(operations, key=lambda op: (op.round, op.step, op.kind == "recv")))

    @cached_property
    def _block_of_round(self) -> list[int]:
        """Which block each round is one of. Rounds of different blocks alternate, as many of each as it repeats.

        A bucket that goes to several receivers, in rounds of different blocks, then goes to them soon after one another
        and is packed once; and no receiver is idle through a whole block.
        """
        most = max((block.repeat for block in self.blocks), default=1)
        spread = (
            ((2 * k + 1) * most // block.repeat, at)
            for at, block in enumerate(self.blocks)
            for k in range(block.repeat)
        )
        return [at for _, at in sorted(spread)]

    def _operations_of_hops(self, rank: int) -> list[Operation]:
        operations = []
        for hop in self.hops:
            edges = self.streams[hop.flow].edges
            sender, receiver = edges[hop.edge]
            if rank not in (sender, receiver):
                continue
            forwarded = any(to == sender for _, to in edges)
            kind: Literal["send", "recv"] = "recv" if rank == receiver else "send"
            peer = sender if rank == receiver else receiver
            buckets = self.buckets(hop.flow)[hop.bucket : hop.bucket + hop.count]
            for at, bucket in enumerate(buckets):
                number, step = hop.when(at, self._local_steps)
                operations.append(Operation(number, step, kind, peer, bucket, forwarded))
        return operations

    def to_json(self) -> dict[str, Any]:
        """Numbers for people and tools; a schedule is made anew from its plan, not read back."""
        return {
            "digest": self.digest,
            "plan": self.plan.digest,
            "bucket_nbytes": self.size.nbytes,
            "slot_nbytes": self.size.slot_nbytes,
            "depth": self.size.depth,
            "streams": len(self.streams),
            "messages": self.messages,
            "rounds": self.rounds,
            "least_rounds": self.least_rounds,
            "staging_nbytes": max((self.staging_nbytes(rank) for rank in range(self.plan.size)), default=0),
        }


def plan_schedule(
    plan: Plan,
    *,
    staging_nbytes: int = DEFAULT_STAGING_NBYTES,
    bucket_nbytes: int | None = None,
    depth: int | None = None,
) -> Schedule:
    """Cut a plan's bytes into buckets and put these into rounds.

    Pure: equal arguments give an equal schedule on every rank.

    Args:
        plan: What is to be moved.
        staging_nbytes: The most staging memory a rank may use; the least of all ranks' limits.
        bucket_nbytes: Nominal bucket size; chosen from the limit if not given.
        depth: Buckets in flight in each direction.

    Raises:
        ScheduleError: The buckets do not fit into the limit.
    """
    size = size_buckets(staging_nbytes, bucket_nbytes, depth, network=not plan.topology.is_flat)
    streams = make_streams(plan, size)
    if plan.topology.is_flat:
        return Schedule(plan, size, streams, colour_rounds(_pair_buckets(streams, size)))
    run = -(-_hops_to_place(streams, size, plan.topology) // _MOST_HOPS)
    flows = [_flow(stream, size, plan.topology) for stream in streams]
    hops = flow_rounds(flows, Ports.of(plan.topology), local_steps(plan.topology), _shortest_run(flows, max(1, run)))
    return Schedule(plan, size, streams, (), tuple(hops))


_MOST_HOPS = 200_000
"""About how many hops are placed one by one, which takes some seconds; of larger plans, runs of buckets are."""


def _hops_to_place(streams: Sequence[Stream], size: BucketSize, topology: Topology) -> int:
    """How many hops there are, those inside a domain at 5/8: they take so much less time to place."""
    domain_of, eighths = topology.domain_of, 0
    for stream in streams:
        inside = sum(domain_of(sender) == domain_of(receiver) for sender, receiver in stream.edges)
        eighths += stream.count(size) * (8 * len(stream.edges) - 3 * inside)
    return eighths // 8


def _shortest_run(flows: Sequence[Flow], run: int) -> int:
    """Half a run, as long as that hardly makes more of them: where most flows are shorter, it only costs rounds.

    A run is handed on when all of it is there.
    """

    def runs(length: int) -> int:
        return sum(-(-flow.count // length) * len(flow.edges) for flow in flows)

    most = runs(run) + runs(run) // 20
    while run > 1 and runs(run // 2) <= most:
        run //= 2
    return run


_MOST_LOCAL_STEPS = 16


def local_steps(topology: Topology) -> int:
    """How many buckets the fast link moves while the network moves one."""
    fast = min(domain.bytes_per_second for domain in topology.domains)
    slow = max(max(port.out_bytes_per_second, port.in_bytes_per_second) for port in topology.ports)
    return max(1, min(_MOST_LOCAL_STEPS, fast // slow))


def _flow(stream: Stream, size: BucketSize, topology: Topology) -> Flow:
    inside = tuple(topology.domain_of(a) == topology.domain_of(b) for a, b in stream.edges)
    return Flow(stream.edges, inside, stream.count(size))


def _pair_buckets(streams: tuple[Stream, ...], size: BucketSize) -> dict[tuple[int, int], int]:
    pairs: dict[tuple[int, int], int] = {}
    for stream in streams:
        for edge in stream.edges:
            pairs[edge] = pairs.get(edge, 0) + stream.count(size)
    return dict(sorted(pairs.items()))
