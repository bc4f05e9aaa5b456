"""Guard: a model whose weights may be of two versions does not run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from reshard.errors import InstallError

if TYPE_CHECKING:
    import torch
    from torch.utils.hooks import RemovableHandle


class Guard:
    """Stands before the forward pass of one worker's model. A paused engine runs none, so its requests live on.

    Args:
        model: The model.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self._hook: RemovableHandle | None = None
        self.reason = ""
        """Why the model may not run; empty while it may."""

    def shut(self, reason: str) -> None:
        """Let no forward pass begin until ``open``."""
        self.reason = reason
        if self._hook is None:
            self._hook = self._model.register_forward_pre_hook(self._refuse)

    def open(self) -> None:
        """Let the model run: its weights are of one version, on all ranks."""
        self.reason = ""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def _refuse(self, *_: Any) -> None:
        raise InstallError(
            f"This engine answers nothing, for its weights may be partly of one version and partly of another: "
            f"{self.reason} The next refit that completes mends it; pause the engine until then.",
            untouched=False,
        )
