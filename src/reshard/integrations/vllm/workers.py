"""Workers: what the workers of one engine tell each other at the end of a call, and which of them may raise.

vLLM's executor reads the replies to a call in the order of ranks and stops at the first error. Replies of ranks behind
stay unread, and the next call takes them for its own: it ends before these ranks have done it, or fails with an error
of the call before. So an error on any worker is raised on the last one, behind which there is none.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, NoReturn

from reshard.errors import PeerError, ReshardError

if TYPE_CHECKING:
    from collections.abc import Sequence

NOTHING_WRITTEN = "No worker of this engine has written anything: its old weights are whole."
"""In the error of an install after which the old weights may serve on."""

UPDATE_OPEN = "An update is still open here"
"""In the error of joining an engine that another trainer has left in the middle of an update."""

SECONDS_METHOD = "reshard_seconds"
"""Of vLLM's worker, for ``collective_rpc``: by step, the seconds of its last install."""


@dataclass(frozen=True)
class Said:
    """What one worker says at the end of a call."""

    error: str
    """Empty if there was none."""

    wrote: bool
    """Whether the call has changed any of its weights."""

    is_shut: bool
    """Whether its model does not run, for weights that were mixed before."""

    is_open: bool
    """Whether an update is under way."""

    @property
    def row(self) -> tuple[str, bool, bool, bool]:
        """Plain data: its arguments."""
        return astuple(self)


def raise_if_last(rank: int, said: Sequence[Said], error: Exception | None, ending: str = "") -> None:
    """On the last worker, raise its own error or, without one, what the first of the others says.

    Args:
        rank: This worker's.
        said: By all workers.
        error: This worker's own.
        ending: What is said besides.
    """
    if rank == len(said) - 1:
        _raise(said, error, ending)


def _raise(said: Sequence[Said], error: Exception | None, ending: str) -> NoReturn:
    if isinstance(error, ReshardError):
        raise type(error)(f"{error.message}{ending}", **error.facts) from error
    if error is not None:
        raise PeerError(f"{type(error).__name__}: {error}{ending}") from error
    rank = next(rank for rank, one in enumerate(said) if one.error)
    raise PeerError(f"Worker {rank}: {said[rank].error}{ending}", rank=rank)
