"""The weight transfer engine ``reshard`` of vLLM: what a worker does when a trainer drives it through vLLM's phases.

    init     join a session in the background                  {"address": ..., "world": ..., "expect": {...}, ...}
    start    nothing                                           requests go on
    update   {"action": "receive", "version": 7}               receive in the background, and return at once
    update   {"action": "install", "version": 7}               in the worker's own thread: install what has landed
    finish   give up what was received and not installed

The base class has been the same from vLLM 0.30 to 0.33.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from vllm.distributed.weight_transfer.base import (  # type: ignore[import-not-found,unused-ignore]
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from reshard.errors import ConfigError
from reshard.integrations.vllm.facts import WorkerFacts
from reshard.integrations.vllm.guard import Guard
from reshard.integrations.vllm.member import Member
from reshard.integrations.vllm.private import ask_for_tiles, hear_workers, let_workers_tell_seconds, vllm_version
from reshard.integrations.vllm.workers import NOTHING_WRITTEN, UPDATE_OPEN, Said, raise_if_last
from reshard.refit.telling import text_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from reshard.integrations.traced import LoadTrace
    from reshard.refit.report import RefitReport


class ReshardInitInfo(WorkerFacts, WeightTransferInitInfo):  # type: ignore[misc,unused-ignore]
    """What the trainer tells every worker once."""


@dataclass
class ReshardUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc,unused-ignore]
    """What a worker is to do for a version."""

    action: Literal["receive", "install"]
    version: int
    to: list[str] | None = None
    """As the source calls ``Session.refit``, as the next two."""
    names: list[str] | None = None
    allow_rollback: bool = False


class ReshardEngine(WeightTransferEngine[ReshardInitInfo, ReshardUpdateInfo]):  # type: ignore[misc,unused-ignore]
    """One worker's part; vLLM makes it when the model is loaded."""

    init_info_cls = ReshardInitInfo
    update_info_cls = ReshardUpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
        vllm_version()
        super().__init__(config, vllm_config, device, model)
        let_workers_tell_seconds()
        if getattr(device, "type", "cpu") == "cpu":
            ask_for_tiles()
        self._member: Member | None = None
        self._guard = Guard(model)
        self._is_open = False
        """Whether vLLM's worker has an update under way."""

    def parse_init_info(self, init_dict: dict[str, Any]) -> ReshardInitInfo | Exception:
        """As the base class; what cannot be read is an error of ``init_transfer_engine``, where all workers meet."""
        try:
            info: ReshardInitInfo = super().parse_init_info(init_dict)
        except Exception as error:
            return error
        return info

    def init_transfer_engine(self, init_info: ReshardInitInfo | Exception) -> None:
        """Join a session; told the same again, it does nothing.

        Raises:
            ConfigError: What the worker was told cannot work; or an update is open, as a trainer that died leaves it:
                the worker has joined, and ``finish_weight_update`` ends the update.
        """

        def join() -> None:
            if isinstance(init_info, Exception):
                raise init_info
            self._join(init_info)

        said = self._together(join)
        if any(one.is_open for one in said):
            raise_if_last(self._rank, said, ConfigError(f"{UPDATE_OPEN}: finish_weight_update ends it."))

    def _join(self, facts: WorkerFacts) -> None:
        if self._member is not None:
            if self._member.facts == facts:
                return
            self.shutdown()
        parallel = self.parallel_config
        if parallel.data_parallel_size > 1:  # replicas that share no experts are told that they are alone
            raise ConfigError(
                "This engine's data parallel ranks share out experts, which is not supported. Start a server for each "
                "replica, without --data-parallel-size, and give each a world of the session."
            )
        rank = parallel.data_parallel_index * parallel.world_size + parallel.rank
        self._member = Member(facts, rank, self.model, self.vllm_config, self.device)

    def start_weight_update(self) -> None:
        """Nothing: what serves is left alone until it is installed."""
        self._is_open = True

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """As the base class, with an error on one worker an error of all."""
        try:
            self._together(
                lambda: super(ReshardEngine, self).update_weights(update_info),
                installs=update_info.get("action") == "install",
            )
        except BaseException:
            self._is_open = False  # as vLLM's worker does, on which it is raised
            raise

    def receive_weights(self, update_info: ReshardUpdateInfo) -> None:
        """Receive a version in the background, or install it."""
        if self._member is None:
            raise ConfigError("This engine is in no session yet: init_weight_transfer_engine comes first.")
        if update_info.action == "receive":
            info = update_info
            self._member.receive(info.version, to=info.to, names=info.names, allow_rollback=info.allow_rollback)
        elif update_info.action == "install":
            self._member.install(update_info.version)
        else:
            raise ConfigError(f"action={update_info.action!r} is unknown; it is 'receive' or 'install'.")

    def finish_weight_update(self) -> None:
        """Give up what was received and not installed."""
        self._is_open = False
        if self._member is not None:
            self._member.leave("the trainer ended the update without it")

    def shutdown(self) -> None:
        """Leave the session."""
        if self._member is not None:
            self._member.close()
            self._member = None

    # -- all workers of this engine -----------------------------------------------------------------------------------

    def _together(self, work: Callable[[], None], *, installs: bool = False) -> tuple[Said, ...]:
        """Do what all workers were told, and let the last one alone raise what went wrong on any of them.

        Args:
            work: This worker's part.
            installs: Whether it writes to the weights. One worker cannot know whether those of its peers are as new as
                its own: where the call fails after any of them has written, no model runs.

        Returns:
            What each worker says, by rank.
        """
        error: Exception | None = None
        try:
            work()
        except Exception as raised:
            error = raised
        wrote = installs and self._member is not None and self._member.wrote
        mine = Said("" if error is None else text_of(error), wrote, bool(self._guard.reason), self._is_open)
        said = tuple(Said(*row) for row in hear_workers(mine.row, self.parallel_config.world_size))
        failed = [f"worker {rank}: {one.error}" for rank, one in enumerate(said) if one.error]
        if failed:
            is_mixed = any(one.wrote for one in said)
            if is_mixed:
                self._guard.shut(failed[0])
            has_all = self._member is not None and self._member.world_size == len(said)  # not one replica of several
            is_old = installs and has_all and not is_mixed and not any(one.is_shut for one in said)
            raise_if_last(self._rank, said, error, f" {NOTHING_WRITTEN}" if is_old else "")
        elif wrote and self._member is not None and self._member.is_whole:
            self._guard.open()
        return said

    @property
    def _rank(self) -> int:
        rank: int = self.parallel_config.rank
        return rank

    @property
    def seconds(self) -> dict[str, float]:
        """What the last install took on this worker, by step."""
        return {} if self._member is None else self._member.seconds

    @property
    def report(self) -> RefitReport | None:
        """What the last refit did on this worker."""
        return None if self._member is None else self._member.report

    @property
    def trace(self) -> LoadTrace | None:
        """Where this worker's pieces lie, and which tensors it takes whole; None before the model is traced."""
        return None if self._member is None else self._member.trace
