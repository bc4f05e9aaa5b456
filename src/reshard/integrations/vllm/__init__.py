"""vLLM: where an engine keeps each weight, and the plug-in that refits a live engine.

The engine's side is the weight-transfer engine ``reshard`` (``engine``), which vLLM finds by an entry point
(``plugin``); it learns its pieces from the model's own loaders (``tracing``) and brings them to life a layer at a time
(``install``). What is used of vLLM's private parts is in ``private`` alone.
"""

from reshard.integrations.vllm.private import MAY_WORK, TRIED, checkpoint_form, vllm_version
from reshard.integrations.vllm.tracing import (
    check_layers,
    check_model,
    engine_manifest,
    rank_model,
    trace_model,
    trace_world,
)

__all__ = [
    "MAY_WORK",
    "TRIED",
    "check_layers",
    "check_model",
    "checkpoint_form",
    "engine_manifest",
    "rank_model",
    "trace_model",
    "trace_world",
    "vllm_version",
]
