"""vLLM's own trainer side on a session: its ``WeightSource`` read shard by shard, and the trainer engine ``reshard``.

For a trainer that is written against vLLM's weight transfer, whatever the backend. One that is not calls
``reshard.connect`` itself and has fewer words between its weights and the session.

What a source can say decides what moves. A ``ModuleSource`` is read as the module that it wraps: FSDP2, FSDP2 over
tensor parallel (strided shards) and replicas, each byte where it is. Of a source of your own, vLLM 0.33 has the pieces
(``iter_local`` with placements); in 0.30 to 0.32 a source can yield full tensors only, so there it gathers, as it
would for any backend.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from vllm.distributed.weight_transfer.base import (  # type: ignore[import-not-found,unused-ignore]
    TrainerInitInfo,
    TrainerWeightTransferEngine,
)

from reshard.errors import ConfigError
from reshard.integrations.vllm.plugin import BACKEND, register
from reshard.integrations.vllm.servers import VLLMClient
from reshard.integrations.vllm.weight_source import read_source
from reshard.refit.connect import connect

if TYPE_CHECKING:
    from collections.abc import Mapping

    from reshard.refit.report import RefitReport
    from reshard.refit.session import Session


@dataclass
class ReshardTrainerInitInfo(TrainerInitInfo):  # type: ignore[misc,unused-ignore]
    """What a rank of the trainer brings; ``rank`` is its rank, as with every backend."""

    backend: ClassVar[str] = BACKEND

    store: str
    """Where the session meets: the address that ``reshard.serve_store`` gave. The engine must reach it too."""

    expect: Mapping[str, int]
    """Processes of each world: the trainer's ranks and the engine's workers."""

    world: str = "trainer"
    engine: str = "engine"
    """The engine's world."""

    session: str = "default"
    first_version: int = 1
    """Of the first ``send_weights``; a trainer that was restarted goes on with a higher one."""

    options: Mapping[str, Any] = field(default_factory=dict)
    """More arguments of ``reshard.connect``."""


class ReshardTrainerEngine(TrainerWeightTransferEngine[ReshardTrainerInitInfo]):  # type: ignore[misc,unused-ignore]
    """One rank of the trainer in a session with the engine behind vLLM's client; made by ``trainer_init``."""

    init_info_cls = ReshardTrainerInitInfo

    def __init__(self, session: Session, init_info: ReshardTrainerInitInfo, client: Any, source: Any) -> None:
        super().__init__(client=client, source=source, is_sender=init_info.is_sender)
        self.rank = init_info.rank  # the base class has it since 0.33
        self.session = session
        self.report: RefitReport | None = None
        """Of the last ``send_weights``."""
        self._version = init_info.first_version - 1
        self._lies: Any = ()  # of nothing that was offered yet

    @classmethod
    def trainer_init(
        cls, init_info: ReshardTrainerInitInfo, *, client: Any, source: Any = None
    ) -> ReshardTrainerEngine:
        """Join the session and bring the engine into it; on every rank of the trainer.

        Raises:
            ConfigError: No source, or an argument that cannot be right.
            MembershipError: Members are missing at the deadline.
        """
        if source is None:
            raise ConfigError("The backend 'reshard' sends what a WeightSource has; pass source=ModuleSource(model).")
        if init_info.world not in init_info.expect or init_info.engine not in init_info.expect:
            raise ConfigError(
                f"expect={dict(init_info.expect)!r} names the processes of each world; {init_info.world!r} and "
                f"{init_info.engine!r} must be in it."
            )
        session = connect(
            init_info.store,
            role="source",
            world=init_info.world,
            rank=init_info.rank,
            world_size=init_info.expect[init_info.world],
            expect=init_info.expect,
            session=init_info.session,
            engines=VLLMClient(client, world=init_info.engine),
            **init_info.options,
        )
        return cls(session, init_info, client, source)

    def send_weights(self, version: int | None = None) -> None:
        """Bring the engine to what the source has now: all four phases, on every rank of the trainer.

        Args:
            version: Which weights these are; one more than the last if not given. vLLM's ``weight_version`` is this.

        Raises:
            ReshardError: As ``Session.refit``.
        """
        self._offer()
        self.report = self.session.refit(self._version + 1 if version is None else version)
        self._version = self.report.version

    def _offer(self) -> None:
        """Offer what the source has, anew only where its tensors lie elsewhere than before: that plans anew."""
        what, lies = read_source(self.source, self.rank)
        if lies != self._lies:
            self.session.offer(what)
            self._lies = lies

    def shutdown(self) -> None:
        """Leave the session; the engine goes on with the weights that it has."""
        self.session.close()


register()  # a trainer's process loads no plug-ins of vLLM's by itself
