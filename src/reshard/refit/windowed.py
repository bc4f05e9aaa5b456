"""WindowedRefit: the compiled refits of a session's windows, run one after the other as one."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

from reshard.plan.bound import find_bound, measure_reach
from reshard.refit import fingerprints

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reshard.layouts.bound import BoundPiece
    from reshard.plan.classes import RouteClass
    from reshard.plan.routes import Route
    from reshard.refit.casts import Cast
    from reshard.refit.compiled import CompiledRefit, RunReport
    from reshard.topology.topology import Topology
    from reshard.transports.base import Deadline


class WindowedRefit:
    """What one refit moves, in as many windows as room for tensors that are taken whole asks for; usually one.

    Args:
        windows: In the order in which they move, the same on every rank.
    """

    def __init__(self, windows: Sequence[CompiledRefit]) -> None:
        self.windows = tuple(windows)
        self._at = 0
        """The window that moves, or moved last."""
        first = self.windows[0]
        self.casts: tuple[Cast, ...] = first.casts
        self.not_covered: tuple[str, ...] = first.not_covered
        self.topology: Topology = first.plan.topology

    def move(self, deadline: Deadline, started: float, empty_room: Callable[[int], None]) -> RunReport:
        """Move all windows once all ranks are known to be here.

        Args:
            deadline: For all of it.
            started: When the call began.
            empty_room: Called with the number of a window that has landed when another one needs its room.

        Raises:
            PeerError: Another rank failed between two windows.
        """
        reports: list[RunReport] = []
        for at, window in enumerate(self.windows):
            self._at = at
            if at:
                empty_room(at - 1)
                # nobody sends into room that a slower rank still reads, and whoever failed there is heard of here
                window.group.meeting.agree("window", bytes.fromhex(window.schedule.digest), deadline)
            reports.append(window.move(deadline, started))
        return _together(reports)

    # -- what it is ------------------------------------------------------------------------------------------------

    @property
    def tensors(self) -> int:
        """How many tensors move, each form of a tensor by itself."""
        return sum(len(window.plan.specs) for window in self.windows)

    @property
    def live(self) -> tuple[BoundPiece, ...]:
        """As ``CompiledRefit.live``."""
        return tuple(bound for window in self.windows for bound in window.live)

    @cached_property
    def link_nbytes(self) -> dict[str, int]:
        """As ``CompiledRefit.link_nbytes``."""
        total: dict[str, int] = {}
        for window in self.windows:
            for kind, nbytes in window.link_nbytes.items():
                total[kind] = total.get(kind, 0) + nbytes
        return total

    @cached_property
    def paths(self) -> dict[str, str]:
        """As ``CompiledRefit.paths``."""
        return {name: path for window in self.windows for name, path in window.paths.items()}

    @cached_property
    def direct_fraction(self) -> float:
        """As ``CompiledRefit.direct_fraction``."""
        nbytes = [sum(spec.nbytes for spec in window.plan.specs) for window in self.windows]
        direct = sum(window.direct_fraction * n for window, n in zip(self.windows, nbytes, strict=True))
        return direct / sum(nbytes) if sum(nbytes) else 1.0

    @property
    def landed_nbytes(self) -> tuple[int, int]:
        """As ``CompiledRefit.landed_nbytes``; other threads may look."""
        at = self._at
        before = sum(window.brings_nbytes for window in self.windows[:at])
        return before + self.windows[at].landed_nbytes[0], sum(window.brings_nbytes for window in self.windows)

    @property
    def copies_nbytes(self) -> int:
        """As ``CompiledRefit.copies_nbytes``."""
        return sum(window.copies_nbytes for window in self.windows)

    def fingerprints_of_share(self, *, moved: bool) -> dict[str, int]:
        """By tensor: the sum over what this rank vouches for; the shares of all ranks add up to the fingerprints.

        Args:
            moved: Whether of what was just moved: then what was summed as it was packed is not read again.
        """
        return fingerprints.add_up(
            fingerprints.of_share(
                window.plan,
                window.group.rank,
                window.sources,
                window.cast_at,
                window.made_fingerprints if moved else {},
            )
            for window in self.windows
        )

    # -- how good the plan is --------------------------------------------------------------------------------------

    @cached_property
    def bound_seconds(self) -> float:
        """The least time of any plan over the ports of the topology, windows or none."""
        return float(find_bound(self._classes, self.topology).seconds)

    @cached_property
    def busiest_seconds(self) -> float:
        """What the busiest port takes, window after window."""
        return float(sum(window.plan.reach.busiest_seconds for window in self.windows))

    @cached_property
    def copies_into(self) -> dict[str, float]:
        """By domain: how many copies of what its ranks want enter it; empty where there is one domain."""
        if self.topology.is_flat:
            return {}
        reach = measure_reach(self._classes, self._routes, self.topology)
        return {name: float(copies) for name, copies in reach.copies_into}

    @cached_property
    def _classes(self) -> list[RouteClass]:
        return [cls for window in self.windows for cls in window.plan.classes]

    @cached_property
    def _routes(self) -> list[Route]:
        """The routes of all windows, their classes as numbered in ``_classes``."""
        routes: list[Route] = []
        first = 0
        for window in self.windows:
            routes += [replace(route, route_class=first + route.route_class) for route in window.plan.routes]
            first += len(window.plan.classes)
        return routes


def _together(reports: Sequence[RunReport]) -> RunReport:
    """What one rank did in all windows."""
    if len(reports) == 1:
        return reports[0]
    links: dict[int, dict[str, None]] = {}
    for report in reports:
        for peer, text in report.links.items():
            links.setdefault(peer, {})[text] = None
    return replace(
        reports[-1],  # from the call to the last byte, and the staging that all share
        move_seconds=sum(report.move_seconds for report in reports),
        sent_nbytes=sum(report.sent_nbytes for report in reports),
        received_nbytes=sum(report.received_nbytes for report in reports),
        read_in_place_nbytes=sum(report.read_in_place_nbytes for report in reports),
        local_nbytes=sum(report.local_nbytes for report in reports),
        links={peer: "; ".join(texts) for peer, texts in sorted(links.items())},
    )
