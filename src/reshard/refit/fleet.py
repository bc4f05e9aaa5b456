"""Fleet: what all ranks of a refit ask for and serve, and whether the version asked for may follow."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from reshard.errors import BindingError, DigestError, ManifestError, VersionError
from reshard.refit.machine import Serving

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


@dataclass(frozen=True)
class Request:
    """What one rank asks for, and what it serves now."""

    version: int
    to: tuple[str, ...]
    """Destination worlds, sorted."""

    names: tuple[str, ...] | None
    """Patterns of tensor names; None for all."""

    allow_rollback: bool
    serving: Serving | None
    """None on a rank that has no destination weights."""

    fresh: bool = False
    """Whether it offers or accepts something else than at the last refit."""

    matched: tuple[bool, ...] = ()
    """For each pattern of ``names``: whether one of its tensors matches."""

    leases: bool = False
    """Whether leases are taken on it, so that its commit waits for them."""

    fault: str = ""
    """What keeps it from taking part."""

    def serves_whole(self, version: int) -> bool:
        """Whether this rank serves that version, all of it."""
        now = self.serving
        return now is not None and now.version == version and not now.torn and not now.partial

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Request:
        serving = None if data["serving"] is None else Serving(**data["serving"])
        names = None if data["names"] is None else tuple(data["names"])
        tuples = {"to": tuple(data["to"]), "names": names, "matched": tuple(data["matched"]), "serving": serving}
        return cls(**{**data, **tuples})


def check_requests(requests: Sequence[Request], members: Sequence[str]) -> None:
    """Check that all ranks ask for the same, and that its version may follow the one served.

    Args:
        requests: By rank.
        members: What each rank is called.

    Raises:
        DigestError: Two ranks ask for different things.
        VersionError: The version is lower than one that is served, and no rollback was allowed.
        BindingError: A rank cannot take part.
        ManifestError: A pattern matches no tensor.
    """
    first = requests[0]
    for rank, request in enumerate(requests):
        if request.fault:
            raise BindingError(f"{members[rank]} cannot take part: {request.fault}.", member=members[rank])
    for rank, request in enumerate(requests):
        for what in ("version", "to", "names", "allow_rollback"):
            ours, theirs = getattr(first, what), getattr(request, what)
            if ours != theirs:
                raise DigestError(
                    f"{members[0]} called refit with {what}={_shown(ours)} and {members[rank]} with "
                    f"{what}={_shown(theirs)}. All ranks of a refit call with the same; no byte has moved.",
                    member=members[rank],
                    option=what,
                )
    for at, pattern in enumerate(first.names or ()):
        if not any(request.matched[at] for request in requests if request.serving is not None):
            raise ManifestError(
                f"names={pattern!r} matches no tensor of a destination. Give names as both sides use them; '*' stands "
                f"for any text.",
                pattern=pattern,
            )
    for rank, request in enumerate(requests):
        served = None if request.serving is None else request.serving.version
        if served is not None and first.version < served and not first.allow_rollback:
            raise VersionError(
                f"Version {first.version} is lower than version {served}, which {members[rank]} serves. Versions "
                f"grow; to go back on purpose call refit with allow_rollback=True on all ranks.",
                version=first.version,
                served=served,
                member=members[rank],
            )


def check_fingerprints(differing: Sequence[Sequence[str]], members: Sequence[str], version: int) -> None:
    """Check that one version is not two different sets of weights.

    Args:
        differing: By rank: the tensors that it serves under this version with other fingerprints than the source's.
        members: What each rank is called.
        version: The version asked for.

    Raises:
        VersionError: There are such tensors.
    """
    for rank, names in enumerate(differing):
        if names:
            raise VersionError(
                f"Version {version} is served by {members[rank]} with other weights: {', '.join(map(repr, names[:5]))}"
                f"{f' and {len(names) - 5} more' if len(names) > 5 else ''} differ. One version is one set of weights: "
                f"raise the version, or pass allow_rollback=True on all ranks if they were replaced on purpose.",
                version=version,
                member=members[rank],
                tensors=tuple(names),
            )


def _shown(value: object) -> str:
    return repr(list(value)) if isinstance(value, tuple) else repr(value)
