"""Holds: an extension of vLLM's workers that stops an install at a place, or lets it fail there."""

from __future__ import annotations

import time
from pathlib import Path

HOLDS = ["--worker-extension-cls", "tests.vllm.holds.Holds"]
"""Starts a server with it."""

_LONGEST_SECONDS = 100


class Holds:
    """Becomes a base of vLLM's worker; its methods are called over ``/collective_rpc``."""

    def hold_next_install(self, where, folder, rank):
        """Stop a rank's next install: say so by a file ``held`` in the folder, and go on when there is ``go``."""

        def hold():
            Path(folder, "held").touch()
            expiry = time.monotonic() + _LONGEST_SECONDS
            while not Path(folder, "go").exists() and time.monotonic() < expiry:
                time.sleep(0.02)

        return self._once(where, int(rank), hold)

    def fail_next_install(self, where, rank):
        """Let a rank's next install fail as if there were no memory."""

        def fail():
            raise MemoryError("no room")

        return self._once(where, int(rank), fail)

    def _once(self, where, rank, what):
        """Do something once in this worker's next install: before its first layer, between two, or inside one."""
        if self.rank != rank:
            return False
        from vllm.model_executor.model_loader.reload import layerwise

        from reshard.integrations.vllm.install import Installer

        owner, name, at = {
            "before": (Installer, "_write", 1),
            "between": (Installer, "install", 2),
            "inside": (layerwise, "_layerwise_process", 4),  # head and embedding come first, then a decoder layer
        }[where]
        call, calls = getattr(owner, name), []

        def counting(*args):
            calls.append(1)
            if len(calls) == at:
                setattr(owner, name, call)
                what()
            return call(*args)

        setattr(owner, name, counting)
        return True
