"""The weight transfer engine ``reshard`` of vLLM: what a worker does when a trainer drives it through vLLM's phases.

    init     join a session in the background                  {"address": ..., "world": ..., "expect": {...}, ...}
    start    nothing                                           requests go on
    update   {"action": "receive", "version": 7}               receive in the background, and return at once
    update   {"action": "install", "version": 7}               in the worker's own thread: install what has landed
    finish   give up what was received and not installed

The base class has been the same from vLLM 0.30 to 0.33.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

from vllm.distributed.weight_transfer.base import (  # type: ignore[import-not-found,unused-ignore]
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from reshard.errors import ConfigError
from reshard.integrations.vllm.guard import Guard
from reshard.integrations.vllm.member import Member, SessionFacts
from reshard.integrations.vllm.private import vllm_version

if TYPE_CHECKING:
    from reshard.integrations.traced import LoadTrace
    from reshard.refit.report import RefitReport


@dataclass
class ReshardInitInfo(WeightTransferInitInfo):  # type: ignore[misc,unused-ignore]
    """What the trainer tells every worker once; see ``SessionFacts``."""

    address: str
    world: str
    expect: dict[str, int]
    session: str = "default"
    commit: str = "staged"
    verify: str = "sum"
    strategy: str = "reshard"
    transport: str = "auto"
    staging_nbytes: int | str = "512MiB"
    topology: dict[str, Any] | None = None
    timeout_seconds: float = 60.0
    check: bool = False
    whole: dict[str, str] = field(default_factory=dict)
    routes: dict[str, str] = field(default_factory=dict)
    trainer: str = ""

    @property
    def facts(self) -> SessionFacts:
        return SessionFacts(**{one.name: getattr(self, one.name) for one in fields(SessionFacts)})


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
        self._member: Member | None = None
        self._guard = Guard(model)

    def init_transfer_engine(self, init_info: ReshardInitInfo) -> None:
        """Join a session; told the same again, it does nothing."""
        facts = init_info.facts
        if self._member is not None:
            if self._member.facts == facts:
                return
            self.shutdown()
        parallel = self.parallel_config
        rank = parallel.data_parallel_index * parallel.world_size + parallel.rank
        self._member = Member(facts, rank, self.model, self.vllm_config, self.device, self._guard)

    def start_weight_update(self) -> None:
        """Nothing: what serves is left alone until it is installed."""

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
        if self._member is not None:
            self._member.leave("the trainer ended the update without it")

    def shutdown(self) -> None:
        """Leave the session."""
        if self._member is not None:
            self._member.close()
            self._member = None

    @property
    def report(self) -> RefitReport | None:
        """What the last refit did on this worker."""
        return None if self._member is None else self._member.report

    @property
    def trace(self) -> LoadTrace | None:
        """Where this worker's pieces lie, and which tensors it takes whole; None before the model is traced."""
        return None if self._member is None else self._member.trace
