"""Fabric: what a GPU shares its fast link with: an NVLink fabric of many hosts, or the GPUs of its own host.

Asked of NVML, through the package ``nvidia-ml-py``, which need not be installed. No GPU has run this.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_UUID_NBYTES = 16


def fabric_of(device: torch.device) -> str | None:
    """A name that GPUs share exactly if a fast link joins them; None where NVML does not tell, and on a CPU."""
    if device.type != "cuda":
        return None
    try:
        import pynvml
    except ImportError:
        return None
    with suppress(pynvml.NVMLError, OSError):
        pynvml.nvmlInit()
        try:
            uuid = torch.cuda.get_device_properties(device).uuid
            handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
            return _fabric_of_handle(pynvml, handle) or f"host {_BOOT_ID.read_text('ascii').strip()}"
        finally:
            pynvml.nvmlShutdown()
    return None


def _fabric_of_handle(pynvml: Any, handle: object) -> str | None:
    """Cluster and clique of an NVLink fabric that is up; None where the GPU is in none."""
    info = pynvml.c_nvmlGpuFabricInfoV_t()
    try:
        pynvml.nvmlDeviceGetGpuFabricInfoV(handle, ctypes.byref(info))
    except pynvml.NVMLError:  # an older driver, or a GPU without a fabric
        return None
    if info.state != pynvml.NVML_GPU_FABRIC_STATE_COMPLETED or info.status != pynvml.NVML_SUCCESS:
        return None
    # as memory: a field of characters would end at the first zero byte
    at = ctypes.addressof(info) + type(info).clusterUuid.offset
    cluster = ctypes.string_at(at, _UUID_NBYTES)
    return f"fabric {cluster.hex()} clique {info.cliqueId}" if any(cluster) else None


def share_a_fabric(labels: Sequence[str | None]) -> list[list[int]] | None:
    """Ranks by what they said of ``fabric_of``; None unless all of them know.

    >>> share_a_fabric(["host a", "host b", "host a"])
    [[0, 2], [1]]
    """
    together: dict[str, list[int]] = {}
    for rank, label in enumerate(labels):
        if label is None:
            return None
        together.setdefault(label, []).append(rank)
    return list(together.values())
