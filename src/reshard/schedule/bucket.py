"""Streams and buckets: what travels together, and in which portions.

All bytes of a plan that take the same edges are one stream. A stream is cut into buckets of a bounded size; a bucket is
packed once by the sender and goes to every receiver of the stream as it is. The number of buckets follows from the
stream's size alone, so rounds can be made for all ranks without expanding any string; where a bucket really begins is
found by each end for itself, at the last row or box that ends within a slack before the nominal place.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from reshard.errors import ScheduleError
from reshard.plan.strings import ByteString, unit_nbytes
from reshard.units import format_nbytes

if TYPE_CHECKING:
    from reshard.plan.plan import Plan
    from reshard.plan.strings import Item


@dataclass(frozen=True, slots=True)
class BucketSize:
    """How large buckets are: nominally ``nbytes``, at most ``slot_nbytes``, of which a rank has a few."""

    nbytes: int
    slack_nbytes: int
    depth: int
    """Buckets in flight in each direction."""

    @property
    def slot_nbytes(self) -> int:
        return self.nbytes + self.slack_nbytes

    @property
    def staging_nbytes(self) -> int:
        """What a rank that both sends and receives needs at most."""
        return 2 * self.depth * self.slot_nbytes


LARGEST_BUCKET = 3 << 20
"""Above 3 MiB a bucket gains no speed on loopback or shared memory; it costs staging, and falls out of caches."""

_DEPTH = 2
"""One bucket is filled or emptied while another one moves. With more in flight, memory is cold when it comes again:
with 4 of 4 MiB, 2,000 tensors over gloo on two cores took 910 ms of CPU instead of 810."""

LARGEST_NETWORK_BUCKET, _NETWORK_DEPTH = 1 << 20, 24
"""Over a network, many small buckets: what is relayed is soon handed on, and there is always one to hand on."""

_LEAST_NETWORK_SLOT = 288 << 10
"""With little staging, rather fewer network buckets in flight than smaller ones."""


_LEAST_WITH_SLACK = 1024
"""Buckets below 1 KiB are cut at their nominal size."""


def size_buckets(
    staging_nbytes: int, bucket_nbytes: int | None = None, depth: int | None = None, *, network: bool = False
) -> BucketSize:
    """Choose bucket size and depth so that a rank's staging stays within a limit.

    Args:
        staging_nbytes: The limit for a rank, both directions together.
        bucket_nbytes: The size wanted; the largest useful one that fits if not given.
        depth: Buckets in flight in each direction; chosen if not given.
        network: Whether buckets go from domain to domain.

    Raises:
        ScheduleError: The buckets do not fit into the limit.

    >>> size_buckets(64 << 20).nbytes, size_buckets(1 << 20).staging_nbytes <= 1 << 20
    (3145728, True)
    """
    largest, usual_depth = (LARGEST_NETWORK_BUCKET, _NETWORK_DEPTH) if network else (LARGEST_BUCKET, _DEPTH)
    if depth is None:
        slot_nbytes = _LEAST_NETWORK_SLOT if bucket_nbytes is None else bucket_nbytes + bucket_nbytes // 8
        depth = max(_DEPTH, min(usual_depth, staging_nbytes // (2 * slot_nbytes)))
    fits = staging_nbytes // (2 * depth)
    nbytes = bucket_nbytes or min(largest, _with_slack(fits))
    size = BucketSize(nbytes, nbytes // 8 // 16 * 16 if nbytes >= _LEAST_WITH_SLACK else 0, depth)
    if nbytes < 1 or size.staging_nbytes > staging_nbytes:
        lower = f", or lower bucket_nbytes to {format_nbytes(_with_slack(fits))} or less" if fits else ""
        raise ScheduleError(
            f"{2 * depth} open operations of up to {format_nbytes(max(size.slot_nbytes, 1))} need "
            f"{format_nbytes(max(size.staging_nbytes, 2 * depth))} of staging; the limit is "
            f"{format_nbytes(staging_nbytes)}. Raise staging_nbytes{lower}.",
            staging_nbytes=staging_nbytes,
            bucket_nbytes=nbytes,
        )
    return size


def _with_slack(slot_nbytes: int) -> int:
    """The largest bucket whose slot is at most ``slot_nbytes``, in whole 16 bytes where there are so many."""
    nbytes = (
        slot_nbytes * 8 // 9 if slot_nbytes * 8 // 9 >= _LEAST_WITH_SLACK else min(slot_nbytes, _LEAST_WITH_SLACK - 1)
    )
    return nbytes // 16 * 16 if nbytes >= 16 else nbytes


@dataclass(frozen=True, slots=True)
class Stream:
    """Bytes that take the same edges: parts of classes' strings."""

    edges: tuple[tuple[int, int], ...]
    parts: tuple[tuple[int, int, int], ...]
    """(class, start, stop)"""

    nbytes: int
    cuts: tuple[int, ...] = ()
    """Where its buckets begin, if it holds blocks that a nominal cut with its slack cannot step around."""

    def count(self, size: BucketSize) -> int:
        """How many buckets the stream is cut into."""
        return len(self.cuts) or -(-self.nbytes // size.nbytes)


def make_streams(plan: Plan, size: BucketSize) -> tuple[Stream, ...]:
    """The streams of a plan, by their edges; copies inside a rank are left out.

    Raises:
        ScheduleError: A block, a row of blocks or an element is larger than a bucket may be.
    """
    parts: dict[tuple[tuple[int, int], ...], list[tuple[int, int, int]]] = {}
    for route in plan.routes:
        edges = tuple(edge for edge in route.edges if edge[0] != edge[1])
        if edges:
            parts.setdefault(edges, []).append((route.route_class, route.start, route.stop))
    units = [_units(plan, at) for at in range(len(plan.classes))]
    streams = []
    for edges, rows in sorted(parts.items()):
        stream = Stream(edges, tuple(rows), sum(stop - start for _, start, stop in rows))
        of_stream = {unit for at, _, _ in rows for unit in units[at]}
        even = len(of_stream) == 1 and size.nbytes % max(of_stream) == 0
        if max(of_stream) > size.slack_nbytes + 1 and not even:
            stream = replace(stream, cuts=_cut_by_hand(plan, stream, size))
        streams.append(stream)
    return tuple(streams)


def _units(plan: Plan, route_class: int) -> frozenset[int]:
    """Sizes of what cannot be cut in a class's string."""
    return frozenset(
        unit_nbytes(box, plan.specs[plan.patterns[at].tensors[0]])
        for at, boxes in plan.classes[route_class].parts
        for box in boxes
    )


def _cut_by_hand(plan: Plan, stream: Stream, size: BucketSize) -> tuple[int, ...]:
    """Begin each bucket where the one before is full."""
    string = _expand(plan, stream)
    cuts = [0]
    while True:
        place = string.floor(cuts[-1] + size.slot_nbytes, size.slack_nbytes)
        if place == string.nbytes:
            return tuple(cuts)
        if place == cuts[-1]:
            tensor, box = string.between(place, string.nbytes)[0]
            spec = plan.specs[tensor]
            what = f"blocks of {list(spec.granule)}" if spec.granule else spec.dtype
            raise ScheduleError(
                f"{spec.name!r}: {box} is made of {what}, of which at least {format_nbytes(unit_nbytes(box, spec))} "
                f"travel together; a bucket holds {format_nbytes(size.slot_nbytes)}. Raise staging_nbytes.",
                tensor=spec.name,
            )
        cuts.append(place)


def _expand(plan: Plan, stream: Stream) -> ByteString:
    items = [item for at, lo, hi in stream.parts for item in plan.string(at).between(lo, hi)]
    items.sort(key=lambda item: (item[0], item[1].start))
    return ByteString(items, plan.specs)


@dataclass(frozen=True, slots=True)
class Bucket:
    """One portion of a stream: (tensor index, box) end to end, each box in C order of its global coordinates."""

    stream: int
    index: int
    items: tuple[Item, ...]
    nbytes: int


def fill_buckets(plan: Plan, stream: int, streams: tuple[Stream, ...], size: BucketSize) -> list[Bucket]:
    """Expand a stream and cut it into its buckets."""
    this = streams[stream]
    string = _expand(plan, this)
    count = this.count(size)
    cuts = this.cuts or tuple(string.floor(k * size.nbytes, size.slack_nbytes) for k in range(count))
    edges = [*cuts, string.nbytes]
    buckets = []
    for k in range(count):
        lo, hi = edges[k], edges[k + 1]
        assert 0 < hi - lo <= size.slot_nbytes, f"bucket {k} of stream {stream} holds {hi - lo} bytes"
        buckets.append(Bucket(stream, k, tuple(string.between(lo, hi)), hi - lo))
    return buckets
