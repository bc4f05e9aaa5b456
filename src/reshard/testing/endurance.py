"""Endurance: a trainer under torchrun and two engine worlds as plain processes refit many times; what they held.

``run`` starts all processes and returns what each told. The trainer is FSDP2 over tensor parallelism on 2 x 2 ranks
with float32 weights; the engines (TP3 and TP2) keep bf16 weights in fused buffers. Before each refit the trainer takes
an optimizer step and writes a dense copy, cast once, to a file; after it every engine rank compares all its weights
with that file, bit for bit.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from reshard.demo.checkpoint import Checkpoint
from reshard.demo.engine import Engine, Ranks
from reshard.demo.trainer import Trainer
from reshard.demo.worlds import SourceWorld
from reshard.errors import EnvironmentNotSupported, VerifyError
from reshard.layouts.manifest import Manifest
from reshard.refit.connect import connect
from reshard.refit.store import serve_store
from reshard.testing.ports import free_port

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from reshard.demo.engine import WantedView
    from reshard.refit.session import Session

TRAINER = "trainer"
ENGINES = {"gen0": 3, "gen1": 2}
EXPECT = {TRAINER: 4, **ENGINES}
_PROMPT, _ANSWER = [5, 6, 7, 8], [9, 10, 11, 12]
"""Token ids that the optimizer steps are taken with; every model has them."""

_STAY_SECONDS = 60.0
_IDLE_PHASES = ("meeting", "gathering")
"""Phases that wait for the others to call: the trainer's step and the comparison, and nothing of the refit."""


@dataclass(frozen=True)
class Held:
    """What a process holds."""

    descriptors: int
    threads: int
    pss_kib: int
    """Its share of memory, without mapped files: their share depends on who else runs on the machine. What the
    allocator keeps for later is given back first."""

    @classmethod
    def now(cls) -> Held:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        rollup = Path("/proc/self/smaps_rollup").read_text("ascii").splitlines()
        pss = sum(int(line.split()[1]) for line in rollup if line.startswith(("Pss_Anon:", "Pss_Shmem:")))
        return cls(len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), pss)


@dataclass(frozen=True)
class Told:
    """What one process saw of all refits."""

    member: str
    seconds: tuple[float, ...]
    """Of each refit, without the wait for others to call."""

    cpu_seconds: tuple[float, ...]
    """Of each call of ``refit`` in this process: other work on the machine hardly shows in it."""

    held: Mapping[int, Held]
    """By number of refits done."""

    changed: tuple[int, ...]
    """The trainer: elements that each optimizer step changed."""

    equal_nbytes: int
    """An engine: bytes that were compared with the dense copies and found equal, in all refits together."""

    casts: int
    """Tensors that were cast in the last refit."""


def run(
    checkpoint: Path,
    refits: int,
    *,
    look_at: Sequence[int] = (10, 50),
    verify: str = "sum",
    backward: bool = True,
    timeout: float = 600.0,
    environment: Mapping[str, str] | None = None,
) -> list[Told]:
    """Start all processes, and return what each of them told, in the order of worlds and ranks.

    Args:
        checkpoint: A folder of weights that the demo reads.
        refits: How many.
        look_at: After which refits the processes look at what they hold.
        verify: As ``connect``.
        backward: Whether the gradients of the optimizer steps come from a forward and backward pass; they are drawn
            otherwise, which is much faster for a real model.
        timeout: Seconds for all of it.
        environment: Of the processes; this one's if not given.

    Raises:
        EnvironmentNotSupported: A process failed or was not done in time; the end of its output is shown.
    """
    with tempfile.TemporaryDirectory(prefix="reshard-endurance-") as folder, serve_store() as store:
        common = [str(store), str(checkpoint), folder, "--refits", str(refits), "--verify", verify]
        common += ["--look-at", *map(str, look_at), *(["--backward"] if backward else [])]
        me = ["-m", "reshard.testing.endurance"]
        torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", str(EXPECT[TRAINER])]
        torchrun += ["--master-port", str(free_port())]
        commands = [[sys.executable, *torchrun, *me, TRAINER, *common]]
        for world, size in ENGINES.items():
            commands += [[sys.executable, *me, world, *common, "--rank", str(rank)] for rank in range(size)]
        _run_all(commands, timeout, {**(environment or os.environ), "OMP_NUM_THREADS": "1"})
        members = [f"{world} rank {rank}" for world, size in EXPECT.items() for rank in range(size)]
        return [_read(Path(folder) / f"{member}.json") for member in members]


def _run_all(commands: Sequence[Sequence[str]], timeout: float, environment: Mapping[str, str]) -> None:
    """Run processes to their end; whatever happens, none of them is left."""
    deadline = time.monotonic() + timeout
    with contextlib.ExitStack() as stack:
        processes = []
        for command in commands:
            log = stack.enter_context(tempfile.TemporaryFile("w+"))
            process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )
            stack.callback(_end, process)
            processes.append((process, log, " ".join(command[:8])))
        waiting = list(processes)
        while waiting and time.monotonic() < deadline:
            time.sleep(0.1)
            waiting = [row for row in waiting if row[0].poll() is None]
            if any(process.returncode for process, *_ in processes):
                deadline = min(deadline, time.monotonic() + 5)  # the others may still say what they saw of it
        failed = [row for row in processes if row[0].poll() != 0]
        if failed:
            tails = []
            for process, log, command_line in failed:
                log.seek(0)
                how = "not done in time" if process.returncode is None else f"exit code {process.returncode}"
                tails.append(f"{how}: {command_line}\n{log.read()[-2000:]}")
            raise EnvironmentNotSupported("\n".join([f"{len(failed)} processes failed.", *tails]))


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(10)


def _read(file: Path) -> Told:
    row = json.loads(file.read_text("utf-8"))
    held = {int(count): Held(**values) for count, values in row["held"].items()}
    lists = {name: tuple(row[name]) for name in ("seconds", "cpu_seconds", "changed")}
    return Told(**{**row, **lists, "held": held})


# -- in the processes -------------------------------------------------------------------------------------------------


class _Notes:
    """What one process notes down."""

    def __init__(self, member: str, folder: Path, look_at: Sequence[int]) -> None:
        self._row: dict[str, Any] = {
            "member": member,
            "seconds": [],
            "cpu_seconds": [],
            "held": {},
            "changed": [],
            "equal_nbytes": 0,
            "casts": 0,
        }
        self._folder = folder
        self._look_at = look_at

    def refit(self, session: Session, version: int) -> None:
        before = time.process_time()
        report = session.refit(version)
        row = self._row
        row["cpu_seconds"].append(time.process_time() - before)
        row["seconds"].append(sum(s for phase, s in report.phases.items() if phase not in _IDLE_PHASES))
        print(report, flush=True)  # shown if the run fails
        row["casts"] = len(report.casts)

    def look(self) -> None:
        row = self._row
        if len(row["seconds"]) in self._look_at:
            row["held"][len(row["seconds"])] = vars(Held.now())

    def trained(self, changed: int) -> None:
        self._row["changed"].append(changed)

    def equal(self, nbytes: int) -> None:
        self._row["equal_nbytes"] += nbytes

    def write(self) -> None:
        """Write all down, and stay until all others have: whoever ends sooner closes connections, and
        leaves its share of memory to the rest."""
        beside = self._folder / f"{self._row['member']}.json~"
        beside.write_text(json.dumps(self._row), "utf-8")
        beside.rename(self._folder / f"{self._row['member']}.json")
        expiry = time.monotonic() + _STAY_SECONDS
        while len(list(self._folder.glob("* rank *.json"))) < sum(EXPECT.values()) and time.monotonic() < expiry:
            time.sleep(0.05)


class _Dense:
    """The dense copies that the trainer writes: two files that take turns, tensors one after another in bf16.

    Each rank casts its own parts and puts them where they belong, which the demo's trainer works out by itself. Now and
    then the whole is compared with what torch's ``full_tensor`` gives.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, version: int, trainer: Trainer) -> None:
        """Write this rank's parts."""
        held = list(trainer.held())
        ends = list(itertools.accumulate(math.prod(one.shape) for one in held))
        places = dict(zip([one.name for one in held], [0, *ends], strict=False))
        if trainer.checkpoint.architecture.tied:
            places["lm_head.weight"] = places["model.embed_tokens.weight"]
        whole = torch.from_file(str(self._file(version)), shared=True, size=ends[-1], dtype=torch.bfloat16)
        for one in held:
            if one.box is not None:
                part = tuple(slice(lo, hi) for lo, hi in zip(one.box.start, one.box.stop, strict=True))
                at = places[one.name]
                whole[at : at + math.prod(one.shape)].view(one.shape)[part] = one.local.to(torch.bfloat16)
        if dist.get_rank() == 0 and version == 0:
            (self._folder / "dense.json").write_text(json.dumps(places), "utf-8")

    def check(self, version: int, trainer: Trainer) -> None:
        """Compare the dense copy with what torch puts together; all ranks call it.

        Raises:
            VerifyError: They differ.
        """
        dist.barrier()
        for name, parameter in trainer.model.named_parameters():
            full = parameter.full_tensor().to(torch.bfloat16)  # type: ignore[attr-defined] # a DTensor
            views: list[WantedView] = [(name, tuple(full.shape), (0,) * full.dim(), full)]
            self.nbytes_equal(version, views)

    def nbytes_equal(self, version: int, views: Sequence[WantedView]) -> int:
        """Compare every view with its part of the dense copy, and return how many bytes that were.

        Raises:
            VerifyError: One differs.
        """
        places = json.loads((self._folder / "dense.json").read_text("utf-8"))
        file = self._file(version)
        whole = torch.from_file(str(file), shared=False, size=file.stat().st_size // 2, dtype=torch.int16)
        for name, shape, start, view in views:
            at = places[name]
            full = whole[at : at + math.prod(shape)].view(shape)
            part = tuple(slice(lo, lo + n) for lo, n in zip(start, view.shape, strict=True))
            if not torch.equal(view.view(torch.int16), full[part]):
                raise VerifyError(f"{name!r} from {start} is not that of version {version}.", tensor=name)
        return sum(2 * view.numel() for *_, view in views)

    def _file(self, version: int) -> Path:
        return self._folder / f"dense-{version % 2}"


class _OneOf(Ranks):
    """A rank of an engine that never computes, and so needs no group."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(None, timedelta(seconds=1))
        self.rank, self.size = rank, size


def _train(options: argparse.Namespace, checkpoint: Checkpoint) -> None:
    dist.init_process_group("gloo")
    try:
        rank = dist.get_rank()
        trainer = Trainer(checkpoint, SourceWorld(2, 2), dtype=torch.float32)
        dense = _Dense(options.folder)
        notes = _Notes(f"{TRAINER} rank {rank}", options.folder, options.look_at)
        with _connect(options, "source", rank) as session:
            session.offer(trainer.model)
            for version in range(options.refits):
                notes.trained(trainer.step(_PROMPT, _ANSWER).changed if options.backward else _step(trainer, version))
                dense.write(version, trainer)
                if version in (0, options.refits - 1):
                    dense.check(version, trainer)
                notes.refit(session, version)
                notes.look()
            notes.write()
    finally:
        dist.destroy_process_group()


def _step(trainer: Trainer, version: int) -> int:
    """An optimizer step with gradients that are drawn instead of computed; how many of this rank's elements changed."""
    draw = torch.randn(1 << 16, generator=torch.Generator().manual_seed(version))
    changed = 0
    for held in trainer.held():
        parameter = torch.nn.Parameter(held.local)
        parameter.grad = draw.repeat(-(-held.local.numel() // len(draw)))[: held.local.numel()].view(held.local.shape)
        before = held.local.clone()
        torch.optim.SGD([parameter], lr=1e-3).step()
        changed += int((held.local != before).sum())
    return changed


def _serve(options: argparse.Namespace, checkpoint: Checkpoint) -> None:
    rank, size = options.rank, ENGINES[options.world]
    engine = Engine(checkpoint.architecture, _OneOf(rank, size), max_positions=1)
    views = engine.wanted_views()
    dense = _Dense(options.folder)
    notes = _Notes(f"{options.world} rank {rank}", options.folder, options.look_at)
    with _connect(options, "destination", rank) as session:
        session.accept(Manifest.from_views(views))
        for version in range(options.refits):
            notes.refit(session, version)
            notes.equal(dense.nbytes_equal(version, views))
            notes.look()
        notes.write()


def _connect(options: argparse.Namespace, role: Any, rank: int) -> Session:
    return connect(
        options.store,
        role=role,
        world=options.world,
        rank=rank,
        world_size=EXPECT[options.world],
        expect=EXPECT,
        verify=options.verify,
        timeout=timedelta(seconds=120),
    )


def main() -> None:
    """One process, as ``run`` starts it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("world", choices=sorted(EXPECT))
    parser.add_argument("store")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rank", type=int)
    parser.add_argument("--refits", type=int, required=True)
    parser.add_argument("--verify", default="sum")
    parser.add_argument("--backward", action="store_true")
    parser.add_argument("--look-at", type=int, nargs="*", default=())
    options = parser.parse_args()
    torch.set_num_threads(1)
    checkpoint = Checkpoint.open(options.checkpoint)
    (_train if options.world == TRAINER else _serve)(options, checkpoint)


if __name__ == "__main__":
    main()
