"""Options: what all ranks of a refit choose alike, read and checked once, compared before anything moves."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from reshard.errors import ConfigError, DigestError
from reshard.plan.plan import STRATEGIES
from reshard.refit.group import CHOICES
from reshard.refit.whole import check_routes
from reshard.transports.verify import VERIFY
from reshard.units import parse_nbytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_LONGEST = timedelta(days=366)
"""What clocks and sockets can count; who waits longer is not waiting for an answer."""


@dataclass(frozen=True)
class Options:
    """What all ranks must choose alike."""

    strategy: str = "reshard"
    transport: str = "auto"
    verify: str = "none"
    staging_nbytes: int = 64 << 20
    """The least of all ranks' limits counts."""

    bucket_nbytes: int | None = None
    depth: int | None = None
    casts: bool = False
    """Whether floating-point tensors that the two sides declare in different dtypes are cast, or refused."""

    commit: str = "in-place"
    """``"in-place"``, or ``"staged"``: bytes land beside the live weights until ``CompiledRefit.commit``."""

    routes: tuple[tuple[str, str], ...] = ()
    """(pattern of names, ``"direct"`` or ``"whole"``); the first that matches decides."""


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
    routes: Mapping[str, str] | None = None,
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
    bucket = None if bucket_nbytes is None else _nbytes("bucket_nbytes", bucket_nbytes)
    nbytes = _nbytes("staging_nbytes", staging_nbytes)
    return Options(strategy, transport, verify, nbytes, bucket, depth, casts, commit, check_routes(routes))


def _nbytes(name: str, given: int | str) -> int:
    try:
        return parse_nbytes(given)
    except ConfigError as error:
        raise ConfigError(f"{name}={given!r}: {error.message}", value=given) from None


def whole_number(name: str, given: object) -> int:
    """An argument that counts something, whatever kind of integer it was given as.

    Raises:
        ConfigError: It is no whole number.
    """
    try:
        return operator.index(given)  # type: ignore[arg-type]
    except TypeError:
        raise ConfigError(f"{name}={given!r} is no whole number. Give an int.") from None


def check_timeout(given: timedelta | None, default: timedelta) -> timedelta:
    """A timeout as it was given, or the one that counts where none was.

    Raises:
        ConfigError: It is no time span, or leaves no time.
    """
    if given is None:
        return default
    if not isinstance(given, timedelta):
        raise ConfigError(f"timeout={given!r} is no time span. Give one, as in timedelta(seconds=30).")
    if not timedelta(0) < given <= _LONGEST:
        raise ConfigError(
            f"timeout={given.total_seconds():g} s cannot work: give more than 0 s, for others to answer, and a year at "
            f"most."
        )
    return given


def same_options(rows: Sequence[dict[str, Any]]) -> Options:
    staging = min(row["staging_nbytes"] for row in rows)
    for name in rows[0]:
        if name == "staging_nbytes":
            continue
        for rank, row in enumerate(rows):
            if row[name] != rows[0][name]:
                raise DigestError(
                    f"Rank 0 called with {name}={rows[0][name]!r} and rank {rank} with {name}={row[name]!r}. "
                    f"All ranks choose the same, those of a session when they connect.",
                    rank=rank,
                    option=name,
                )
    routes = tuple((pattern, way) for pattern, way in rows[0]["routes"])
    return Options(**{**rows[0], "staging_nbytes": staging, "routes": routes})
