"""The plug-in that vLLM loads in each of its processes: it names the weight transfer engine, and its trainer's side."""

from __future__ import annotations

import contextlib

BACKEND = "reshard"
"""What ``weight_transfer_config={"backend": ...}`` calls it."""


def register() -> None:
    """Tell vLLM of the engine and of its trainer's side; called again, it does nothing."""
    from vllm.distributed.weight_transfer.factory import (  # type: ignore[import-not-found,unused-ignore]
        WeightTransferEngineFactory,
        WeightTransferTrainerFactory,
    )

    with contextlib.suppress(ValueError):  # vLLM loads a plug-in more than once in some processes
        WeightTransferEngineFactory.register_engine(BACKEND, "reshard.integrations.vllm.engine", "ReshardEngine")
    with contextlib.suppress(ValueError):
        WeightTransferTrainerFactory.register_engine(
            BACKEND, "reshard.integrations.vllm.source", "ReshardTrainerEngine"
        )
