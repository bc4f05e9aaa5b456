"""One program drives actors: processes that know nothing of each other but the address it gives them.

python examples/sessions/actors.py
"""

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch

import reshard

EXPECT = {"trainer": 1, "small": 1, "large": 1}


class Actor:
    """What lives in each process: a layer, and its session."""

    def join(self, address: str, world: str) -> None:
        role = "source" if world == "trainer" else "destination"
        self.layer = torch.nn.Linear(32, 32, dtype=torch.bfloat16 if world == "small" else torch.float32)
        self.session = reshard.connect(address, role=role, world=world, rank=0, expect=EXPECT)
        (self.session.offer if role == "source" else self.session.accept)(self.layer)

    def refit(self, version: int, to: list[str]) -> str:
        return str(self.session.refit(version, to=to))


ACTOR = Actor()  # one in each process


def call(method: str, *args: object) -> object:
    """Runs in an actor's process."""
    return getattr(ACTOR, method)(*args)


if __name__ == "__main__":
    actors = {world: ProcessPoolExecutor(1, mp_context=get_context("spawn")) for world in EXPECT}
    with reshard.serve_store("127.0.0.1") as store:
        for joining in [actor.submit(call, "join", str(store), world) for world, actor in actors.items()]:
            joining.result(timeout=60)
        for version, to in enumerate([["small", "large"], ["small"], ["small", "large"]]):
            refits = [actors[world].submit(call, "refit", version, to) for world in ["trainer", *to]]
            print(*(refit.result(timeout=60) for refit in refits), sep="\n", flush=True)
    for actor in actors.values():
        actor.shutdown()
