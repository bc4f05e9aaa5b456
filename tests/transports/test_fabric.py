"""What NVML says of a GPU's fabric becomes the name of a domain. The NVML here is one of our own: there is no GPU."""

from __future__ import annotations

import ctypes
import sys
from types import SimpleNamespace

import pytest
import torch

from reshard.transports.fabric import fabric_of, share_a_fabric

GPU = torch.device("cuda", 0)


class NVMLError(Exception):
    pass


class Info(ctypes.Structure):
    _fields_ = (
        ("version", ctypes.c_uint),
        ("clusterUuid", ctypes.c_char * 16),
        ("status", ctypes.c_uint),
        ("cliqueId", ctypes.c_uint32),
        ("state", ctypes.c_uint8),
    )


@pytest.fixture
def nvml(monkeypatch):
    """A pynvml whose one GPU is in clique 7 of a fabric, until a test changes that."""
    fake = SimpleNamespace(
        NVMLError=NVMLError,
        NVML_SUCCESS=0,
        NVML_GPU_FABRIC_STATE_COMPLETED=3,
        c_nvmlGpuFabricInfoV_t=Info,
        facts={"clusterUuid": bytes([1, 0, 2] + [0] * 12 + [9]), "status": 0, "cliqueId": 7, "state": 3},
        opened=0,
        asked=[],
    )

    def init():
        fake.opened += 1

    def shutdown():
        fake.opened -= 1

    def fabric_info(handle, reference):
        if fake.facts is None:
            raise NVMLError("Not Supported")
        fake.asked.append(handle)
        info = reference._obj
        ctypes.memmove(ctypes.addressof(info) + Info.clusterUuid.offset, fake.facts["clusterUuid"], 16)
        info.status, info.cliqueId, info.state = (fake.facts[name] for name in ("status", "cliqueId", "state"))

    fake.nvmlInit, fake.nvmlShutdown, fake.nvmlDeviceGetGpuFabricInfoV = init, shutdown, fabric_info
    fake.nvmlDeviceGetHandleByUUID = lambda uuid: uuid
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="abc"))
    yield fake
    assert fake.opened == 0


def test_a_fabric_is_named_by_all_bytes_of_its_cluster_and_by_its_clique(nvml):
    assert fabric_of(GPU) == "fabric 01000200000000000000000000000009 clique 7"
    assert nvml.asked == ["GPU-abc"]


@pytest.mark.parametrize("change", [{"state": 1}, {"status": 3}, {"clusterUuid": bytes(16)}, None])
def test_without_a_fabric_that_is_up_the_host_is_the_domain(nvml, change):
    nvml.facts = None if change is None else nvml.facts | change
    assert fabric_of(GPU).startswith("host ")


def test_where_nvml_does_not_answer_nothing_is_known(nvml):
    def fails():
        raise NVMLError("Driver Not Loaded")

    nvml.nvmlInit = fails
    assert fabric_of(GPU) is None


def test_without_the_package_and_on_a_cpu_nothing_is_known(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert fabric_of(GPU) is None
    assert fabric_of(torch.device("cpu")) is None


def test_interleaved_ranks_are_put_together_by_their_fabric():
    assert share_a_fabric(["a", "b", "a", "b", "c"]) == [[0, 2], [1, 3], [4]]
    assert share_a_fabric(["a", None]) is None
