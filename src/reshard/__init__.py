"""reshard: move weights from training processes to inference processes, only the overlaps, proven and versioned."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from reshard.version import __version__

if TYPE_CHECKING:
    from reshard.layouts.box import Box
    from reshard.layouts.layout import Layout
    from reshard.layouts.manifest import Manifest
    from reshard.layouts.mesh import Mesh
    from reshard.layouts.piece import Piece, TensorSpec
    from reshard.layouts.placement import Strided
    from reshard.plan.plan import Plan, plan_refit
    from reshard.refit.collective import reshard, xferdtensor
    from reshard.refit.compile import compile_refit
    from reshard.refit.compiled import CompiledRefit, RunReport
    from reshard.refit.connect import connect
    from reshard.refit.report import RefitReport
    from reshard.refit.session import Session
    from reshard.refit.store import serve_store
    from reshard.schedule.schedule import Schedule, plan_schedule
    from reshard.topology.topology import Topology
    from reshard.transports.shm import share_memory_

_WHERE = {
    "Box": "layouts.box",
    "CompiledRefit": "refit.compiled",
    "Layout": "layouts.layout",
    "Manifest": "layouts.manifest",
    "Mesh": "layouts.mesh",
    "Piece": "layouts.piece",
    "Plan": "plan.plan",
    "RefitReport": "refit.report",
    "RunReport": "refit.compiled",
    "Schedule": "schedule.schedule",
    "Session": "refit.session",
    "Strided": "layouts.placement",
    "TensorSpec": "layouts.piece",
    "Topology": "topology.topology",
    "compile_refit": "refit.compile",
    "connect": "refit.connect",
    "plan_refit": "plan.plan",
    "plan_schedule": "schedule.schedule",
    "reshard": "refit.collective",
    "serve_store": "refit.store",
    "share_memory_": "transports.shm",
    "xferdtensor": "refit.collective",
}

__all__ = [
    "Box",
    "CompiledRefit",
    "Layout",
    "Manifest",
    "Mesh",
    "Piece",
    "Plan",
    "RefitReport",
    "RunReport",
    "Schedule",
    "Session",
    "Strided",
    "TensorSpec",
    "Topology",
    "__version__",
    "compile_refit",
    "connect",
    "plan_refit",
    "plan_schedule",
    "reshard",
    "serve_store",
    "share_memory_",
    "xferdtensor",
]


def __getattr__(name: str) -> Any:
    """Import a public name at its first use, so that the pure core never waits for torch."""
    if name not in _WHERE:
        raise AttributeError(f"module 'reshard' has no attribute {name!r}")
    value = getattr(import_module(f"reshard.{_WHERE[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
