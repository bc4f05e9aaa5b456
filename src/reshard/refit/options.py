"""Options: what all ranks of a refit choose alike, read and checked once, compared before anything moves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from reshard.errors import ConfigError, DigestError
from reshard.plan.plan import STRATEGIES
from reshard.refit.group import CHOICES
from reshard.refit.whole import check_routes
from reshard.transports.verify import VERIFY
from reshard.units import parse_nbytes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


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
    bucket = None if bucket_nbytes is None else parse_nbytes(bucket_nbytes)
    nbytes = parse_nbytes(staging_nbytes)
    return Options(strategy, transport, verify, nbytes, bucket, depth, casts, commit, check_routes(routes))


def same_options(rows: Sequence[dict[str, Any]]) -> Options:
    staging = min(row["staging_nbytes"] for row in rows)
    for name in rows[0]:
        if name == "staging_nbytes":
            continue
        for rank, row in enumerate(rows):
            if row[name] != rows[0][name]:
                raise DigestError(
                    f"Rank 0 called with {name}={rows[0][name]!r} and rank {rank} with {name}={row[name]!r}. "
                    f"All ranks of a refit choose the same.",
                    rank=rank,
                    option=name,
                )
    routes = tuple((pattern, way) for pattern, way in rows[0]["routes"])
    return Options(**{**rows[0], "staging_nbytes": staging, "routes": routes})
