"""Story: what all processes of one demo know, and how one of them meets its own world and speaks with the others."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reshard.demo.checkpoint import Checkpoint
    from reshard.demo.trainer import Trainer
    from reshard.demo.worlds import DestinationWorld, SourceWorld


class Say(Protocol):
    """Tells the parent what this rank is doing, and the user too where ``aloud``."""

    def __call__(self, text: str, *, aloud: bool = False) -> None: ...


@dataclass(frozen=True)
class Story:
    """What all processes of one demo know."""

    checkpoint: Checkpoint
    source: SourceWorld
    destination: DestinationWorld
    question: str
    max_tokens: int = 24
    rounds: int = 3
    timeout: float = 240.0
    """Seconds for all of it, and for each wait."""

    @property
    def size(self) -> int:
        return self.source.size + self.destination.size


class Member:
    """One rank's process: its own world's default group, and the group of all ranks beside it."""

    def __init__(self, say: Say, story: Story, name: str, rank: int, host: str, port: int) -> None:
        self.story = story
        self.name = name
        self.rank = rank
        self.is_source = name == "source"
        self.all_rank = rank if self.is_source else story.source.size + rank
        self.timeout = timedelta(seconds=story.timeout)
        self._say = say
        store = dist.TCPStore(host, port, None, is_master=False, wait_for_workers=False, timeout=self.timeout)
        self.store = dist.PrefixStore("all", store)
        self._own_store = dist.PrefixStore(name, store)

    def __enter__(self) -> Member:
        size = (self.story.source if self.is_source else self.story.destination).size
        self._say("meeting its world")
        dist.init_process_group("gloo", store=self._own_store, rank=self.rank, world_size=size, timeout=self.timeout)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            dist.destroy_process_group()

    def say(self, text: str, *, together: bool = False) -> None:
        """Tell what this rank is doing; the user hears it once a world, or once where all do it together."""
        if together:
            self._say(text, aloud=self.all_rank == 0)
        else:
            self._say(f"{self.name}: {text}", aloud=self.rank == 0)

    def prompt(self) -> list[int]:
        """The question in tokens, from the rank that has the tokenizer."""
        self.store.wait(["prompt"], self.timeout)
        tokens: list[int] = json.loads(self.store.get("prompt"))
        return tokens

    def answer(self, trainer: Trainer, prompt: Sequence[int]) -> list[int]:
        stop = self.story.checkpoint.architecture.stop_tokens
        return trainer.generate(prompt, max_tokens=self.story.max_tokens, stop=stop)

    def collect(self, mine: list[str]) -> list[str]:
        """Give a text to all ranks and return everyone's, the source's first."""
        self.store.set(f"said/{self.all_rank}", mine[0])
        keys = [f"said/{rank}" for rank in range(self.story.size)]
        self.store.wait(keys, self.timeout)
        return [self.store.get(key).decode() for key in keys]
