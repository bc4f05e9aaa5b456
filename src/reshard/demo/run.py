"""Run: the story of the demo, as each rank of the two worlds lives it.

    source ranks                                destination ranks
    ------------                                -----------------
    own world: default group, FSDP2 (over TP)   own world: default group, a group for each replica
    model loaded, answers                       poisoned buffers, garbage
              '------ a session, and a group of all ranks, beside the default groups ------'
    offer                                       accept
    refit 1 ----------------------------------> answers, from those very buffers
                      every element compared
                      all strategies and the usual way in turn, poisoned before, checked after
                      the same as if each world were on a host of its own, with copies counted
    optimizer step, answers
    refit 2 ----------------------------------> answers again
                      every element compared

Ranks of the group of all: the source's first, then the destination's.
"""

from __future__ import annotations

import hashlib
import json
import resource
import statistics
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from reshard.demo.engine import Engine, Ranks
from reshard.demo.groups import gloo_group
from reshard.demo.launch import Job, run_jobs
from reshard.demo.outcome import Answers, Outcome, RankFacts, Refitted
from reshard.demo.usual_way import FORMS, UsualWay
from reshard.demo.worlds import DestinationWorld, SourceWorld, check_ranks
from reshard.errors import EnvironmentNotSupported
from reshard.layouts.manifest import Manifest
from reshard.refit.compile import compile_refit
from reshard.refit.connect import connect
from reshard.topology import presets
from reshard.transports.shm import share_memory_
from reshard.units import format_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from reshard.demo.checkpoint import Checkpoint
    from reshard.demo.engine import WantedView
    from reshard.demo.trainer import Held, Trainer
    from reshard.plan.plan import Plan
    from reshard.refit.compiled import CompiledRefit
    from reshard.refit.report import RefitReport
    from reshard.topology.topology import Topology

STRATEGIES = {
    "reshard": "reshard",
    "point_to_point": "point-to-point",
    "gather_broadcast_same_transport": "gather-broadcast",
}
"""By the name in the outcome: the strategies of the library."""

GARBAGE_TOKENS = 8

_ANY_RATE = 10**9
"""Bytes a second of a port: with equal ports it changes no route."""

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",  # the model is a folder; nothing is to be fetched
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
"""Of every process: ranks share the cores of one machine."""


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


def run_demo(story: Story, progress: Callable[[str], None]) -> Outcome:
    """Run both worlds on this machine and return what came out.

    Raises:
        LayoutError: A world's layout cannot hold the model.
        ConfigError: The worlds are too large for one machine.
        RefitTimeout: It was not done in time; the message names who was still doing what.
        ReshardError: What a rank raised.
    """
    check_ranks(story.source, story.destination)
    story.source.check(story.checkpoint.architecture)
    story.destination.check(story.checkpoint.architecture)
    # The parent hosts the store, so that no rank's end takes it away from the others.
    store = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    jobs = [
        Job(f"source rank {r}", source_rank, (story, r, store.host, store.port)) for r in range(story.source.size)
    ] + [
        Job(f"destination rank {r}", destination_rank, (story, r, store.host, store.port))
        for r in range(story.destination.size)
    ]
    facts = run_jobs(jobs, timeout=story.timeout, progress=progress, environment=ENVIRONMENT)
    return _outcome_of(story, facts[: story.source.size], facts[story.source.size :])


def source_rank(say: Say, story: Story, rank: int, host: str, port: int) -> dict[str, Any]:
    """Be rank ``rank`` of the source world, from start to end."""
    _prepare_process()
    say("loading transformers")
    from transformers import AutoTokenizer
    from transformers.utils.logging import set_verbosity_error

    from reshard.demo.trainer import Trainer

    set_verbosity_error()
    us = _World(say, story, "source", rank, host, port)
    with us:
        us.say(f"building the model: {story.source}, FSDP2 on {story.source.size} ranks")
        trainer = Trainer(story.checkpoint, story.source)
        tokenizer = AutoTokenizer.from_pretrained(str(story.checkpoint.folder)) if rank == 0 else None
        if tokenizer is not None:
            us.store.set("prompt", json.dumps(_encode(tokenizer, story.question)))
        prompt = us.prompt()
        us.say("answering from the trainer's weights")
        answer = us.answer(trainer, prompt)
        notes = _share(trainer)
        together = _Together(us, src=Manifest.from_torch(trainer.model), held=list(trainer.held()), trainer=trainer)
        together.refit_and_compare()
        us.say("taking an optimizer step that makes this answer less likely")
        stepped = trainer.step(prompt, answer)
        us.say(f"the step changed {stepped.changed:,} weights; answering again")
        answers = [answer, us.answer(trainer, prompt)]
        together.refit_again()
        said = us.collect([json.dumps(answers)])
        texts = None if tokenizer is None else _texts(tokenizer, story, said)
        return {
            **together.facts(trainer.nbytes),
            "numel": trainer.numel,
            "texts": texts,
            "notes": notes,
            "loss": stepped.loss,
            "changed": stepped.changed,
        }


def destination_rank(say: Say, story: Story, rank: int, host: str, port: int) -> dict[str, Any]:
    """Be rank ``rank`` of the destination world, from start to end."""
    _prepare_process()
    us = _World(say, story, "destination", rank, host, port)
    with us:
        tp = story.destination.tp
        replica = None
        for first in range(0, story.destination.size, tp):  # every rank makes every replica's group
            ranks = list(range(first, first + tp))
            group = dist.new_group(ranks, timeout=us.timeout)
            replica = group if rank in ranks else replica
        prompt = us.prompt()
        engine = Engine(
            story.checkpoint.architecture,
            Ranks(replica, us.timeout),
            max_positions=len(prompt) + story.max_tokens,
        )
        us.say(f"answering from poisoned buffers: {story.destination}, {story.destination.size} ranks")
        stop = story.checkpoint.architecture.stop_tokens
        answers = [engine.generate(prompt, max_tokens=min(story.max_tokens, GARBAGE_TOKENS))]

        def answer() -> None:
            us.say("answering from the buffers that were refitted")
            answers.append(engine.generate(prompt, max_tokens=story.max_tokens, stop=stop))

        views = engine.wanted_views()
        together = _Together(us, dst=Manifest.from_views(views), views=views, engine=engine)
        together.refit_and_compare(answer)
        together.refit_again(answer)
        us.collect([json.dumps(answers)])
        return together.facts(engine.nbytes)


class _World:
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

    def __enter__(self) -> _World:
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


class _Together:
    """What all ranks of both worlds do together, in the same order."""

    def __init__(
        self,
        us: _World,
        *,
        src: Manifest | None = None,
        dst: Manifest | None = None,
        held: Sequence[Held] = (),
        trainer: Trainer | None = None,
        views: Sequence[WantedView] = (),
        engine: Engine | None = None,
    ) -> None:
        self._us = us
        self._trainer, self._engine, self._views = trainer, engine, views
        self._mismatches: list[str] = []
        self._refits: list[tuple[float, RefitReport]] = []
        self._held = held
        self._src, self._dst = src, dst
        self._group = gloo_group(us.store, "all", us.all_rank, us.story.size, us.timeout)
        us.say("meeting in a session", together=True)
        self._session = connect(
            us.store,
            role="source" if us.is_source else "destination",
            world=us.name,
            rank=us.rank,
            expect={"source": us.story.source.size, "destination": us.story.destination.size},
            commit="in-place",  # the demo shows that nobody holds more than its own pieces and some staging
            verify="none",  # it compares every element itself, and times the same work as the other ways do
            timeout=us.timeout,
        )
        if trainer is not None:
            self._session.offer(trainer.model)
        else:
            assert dst is not None
            self._session.accept(dst)
        self._compile_seconds = 0.0
        self._seconds: dict[str, list[float]] = {}
        self._plan: Plan
        self._entered: dict[str, int] = {}
        """By strategy: the bytes that this rank took from the other world where each world is a host of its own."""

    def _compile(self, strategy: str, topology: Topology | None = None) -> CompiledRefit:
        return compile_refit(
            self._group,
            src=self._src,
            dst=self._dst,
            strategy=strategy,
            topology=topology,
            timeout=self._us.timeout,
        )

    # -- the refits ------------------------------------------------------------------------------------------------

    def refit_and_compare(self, answer: Callable[[], None] | None = None) -> None:
        """Refit to version 1, check it, and time every way in turn."""
        self._refit()
        if answer is not None:
            answer()
        self._check("after refit 1")
        self._expected = self._content()
        # Only now: until here no rank has had more of the model than its own pieces.
        ways = self._ways()
        rounds = self._us.story.rounds
        for turn in range(rounds):
            self._us.say(f"timing every way, round {turn + 1} of {rounds}", together=True)
            for name, way in ways.items():
                if self._engine is not None:
                    self._engine.poison()
                self._seconds.setdefault(name, []).append(self._timed(way)[0])
                self._compare_with_refit_1(name)
        self._count_copies()

    def _compare_with_refit_1(self, name: str) -> None:
        if self._content() != self._expected:
            self._mismatches.append(f"{self._me}: other bytes than refit 1 left, after {name}")

    def _count_copies(self) -> None:
        """Refit as if each world were on a host of its own, and count what comes from the other one."""
        story = self._us.story
        ranks = [range(story.source.size), range(story.source.size, story.size)]
        topology = presets.hosts(ranks, port_bytes_per_second=_ANY_RATE, names=("source", "destination"))
        self._us.say("refitting as if each world were on a host of its own", together=True)
        for name, strategy in STRATEGIES.items():
            if strategy == "gather-broadcast":
                continue
            refit = self._compile(strategy, topology)
            if self._engine is not None:
                self._engine.poison()
            refit.run(self._us.timeout)
            self._compare_with_refit_1(f"{name} between two hosts")
            theirs = ranks[self._us.is_source]
            taken = refit.schedule.for_rank(self._us.all_rank)
            self._entered[name] = sum(op.bucket.nbytes for op in taken if op.kind == "recv" and op.peer in theirs)

    def _ways(self) -> dict[str, Callable[[], object]]:
        """What is timed, by its name in the outcome: the library's strategies and the usual way by hand."""
        us = self._us
        ways: dict[str, Callable[[], object]] = {}
        for name, strategy in STRATEGIES.items():
            refit = self._compile(strategy)
            if name == "reshard":
                self._plan = refit.plan
            ways[name] = partial(refit.run, us.timeout)
        store, sources, size = dist.PrefixStore("usual", us.store), us.story.source.size, us.story.size
        usual = UsualWay(store, us.all_rank, sources, size, us.timeout, held=self._held, views=self._views)
        return ways | {form: partial(usual.run, form) for form in FORMS}

    def refit_again(self, answer: Callable[[], None] | None = None) -> None:
        """Refit to version 2, without a new plan, and check it."""
        self._refit()
        if answer is not None:
            answer()
        self._check("after refit 2")

    def _refit(self) -> None:
        self._group.barrier().wait(self._us.timeout)
        report = self._session.refit(len(self._refits) + 1)
        planning = sum(report.phases.get(phase, 0.0) for phase in ("meeting", "planning"))
        seconds, planned = self._slowest(report.seconds - planning), self._slowest(planning)
        self._compile_seconds = self._compile_seconds or planned
        self._refits.append((seconds, report))
        self._us.say(f"refit {len(self._refits)} took {format_seconds(seconds)}", together=True)

    def _timed(self, way: Callable[[], Any]) -> tuple[float, Any]:
        """Do it together with all ranks; the seconds are those of the slowest."""
        self._group.barrier().wait(self._us.timeout)
        begun = time.perf_counter()
        result = way()
        return self._slowest(time.perf_counter() - begun), result

    def _slowest(self, seconds: float) -> float:
        most = torch.tensor([seconds], dtype=torch.float64)
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
        self._group.allreduce([most], options).wait(self._us.timeout)
        return most.item()

    # -- the checks ------------------------------------------------------------------------------------------------

    @property
    def _me(self) -> str:
        return f"{self._us.name} rank {self._us.rank}"

    @torch.no_grad()
    def _check(self, when: str) -> None:
        """Compare every element of the destination with the source's, tensor by tensor, without the library.

        The source's ranks put each tensor together with torch's own ``full_tensor``; rank 0 broadcasts it; each
        destination rank compares its views bit for bit. Nobody holds more than one whole tensor at a time.
        """
        self._us.say("comparing every element with the source's", together=True)
        by_name: dict[str, list[WantedView]] = {}
        for wanted in self._views:
            by_name.setdefault(wanted[0], []).append(wanted)
        tensors = {} if self._trainer is None else self._trainer.tensors()
        for name, shape in self._shapes(tensors):
            full = tensors[name].full_tensor() if tensors else torch.empty(shape, dtype=torch.bfloat16)
            self._group.broadcast(full, 0).wait(self._us.timeout)
            for _, _, start, view in by_name.pop(name, ()):
                here = full[tuple(slice(lo, lo + n) for lo, n in zip(start, view.shape, strict=True))]
                wrong = int((view.view(torch.int16) != here.view(torch.int16)).sum())
                if wrong:
                    self._mismatches.append(f"{self._me}: {wrong:,} elements of {name!r} {when}")
        self._mismatches += [f"{self._me}: {name!r} has no source {when}" for name in by_name]

    def _shapes(self, tensors: Mapping[str, torch.Tensor]) -> list[tuple[str, tuple[int, ...]]]:
        """All tensors of the source, told by its first rank: also those that no view here wants."""
        if self._us.all_rank == 0:
            self._us.store.set("shapes", json.dumps([(name, list(tensor.shape)) for name, tensor in tensors.items()]))
        self._us.store.wait(["shapes"], self._us.timeout)
        return [(name, tuple(shape)) for name, shape in json.loads(self._us.store.get("shapes"))]

    def _content(self) -> str:
        """SHA-256 of all that this rank wants, padding left out."""
        content = hashlib.sha256()
        for _, _, _, view in self._views:
            content.update(view.contiguous().view(torch.uint8).numpy().data)
        return content.hexdigest()

    # -- what came out ---------------------------------------------------------------------------------------------

    def facts(self, holds: int) -> dict[str, Any]:
        plan = self._plan
        me = self._us.all_rank
        report = self._refits[0][1]
        return {
            "facts": RankFacts(
                world=self._us.name,
                rank=self._us.rank,
                holds=holds,
                staging=report.staging_nbytes,
                sent=plan.sent_nbytes().get(me, 0),
                received=plan.received_nbytes().get(me, 0),
                links=tuple(report.links.items()),
            ),
            "refits": [seconds for seconds, _ in self._refits],
            "landed": [report.received_nbytes for _, report in self._refits],
            "seconds": {name: statistics.median(times) for name, times in self._seconds.items()},
            "compile_seconds": self._compile_seconds,
            "entered": self._entered,
            "distinct_nbytes": sum(spec.nbytes for spec in plan.specs),
            "mismatches": self._mismatches,
            "plan": plan.summary(),
        }


def _prepare_process() -> None:
    """Make this process one of many on a small machine, and let it keep many tensors' memory open."""
    import logging

    torch.set_num_threads(1)
    logging.getLogger("torch").setLevel(logging.ERROR)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 1 << 16)), hard))


def _share(trainer: Trainer) -> list[str]:
    """Move the trainer's weights into shared memory, once, so that others can read them in one copy."""
    try:
        share_memory_([held.local for held in trainer.held()])
    except EnvironmentNotSupported as error:
        return [f"The trainer's weights stay in private memory, which costs a second copy: {error}"]
    return []


def _encode(tokenizer: Any, question: str) -> list[int]:
    """The question as a chat, or as it stands where the model is none that chats."""
    if tokenizer.chat_template:
        chat = [{"role": "user", "content": question}]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        return [int(token) for token in tokenizer(text, add_special_tokens=False)["input_ids"]]
    return [int(token) for token in tokenizer(question)["input_ids"]]


def _texts(tokenizer: Any, story: Story, said: Sequence[str]) -> dict[str, Any]:
    """The answers of all ranks in words: what each version said, and whether all agree with the source."""
    answers = [json.loads(text) for text in said]
    sources, destinations = answers[: story.source.size], answers[story.source.size :]
    garbage = destinations[0][0]
    versions = [
        {
            "source": tokenizer.decode(source, skip_special_tokens=True).strip(),
            "destination": tokenizer.decode(destinations[0][1 + index], skip_special_tokens=True).strip(),
            "agree": all(told[1 + index] == source for told in destinations)
            and all(s[index] == source for s in sources),
        }
        for index, source in enumerate(sources[0])
    ]
    return {"before": tokenizer.decode(garbage, skip_special_tokens=False), "versions": versions}


def _outcome_of(story: Story, sources: Sequence[dict[str, Any]], destinations: Sequence[dict[str, Any]]) -> Outcome:
    first = sources[0]
    every = [*sources, *destinations]
    mismatches = tuple(text for facts in every for text in facts["mismatches"])
    seconds = dict(first["seconds"])
    forms = {form: seconds.pop(form) for form in FORMS}
    seconds["gather_broadcast"] = min(forms.values())
    copies = {
        name: {
            world: sum(facts["entered"][name] for facts in ranks) / first["distinct_nbytes"]
            for world, ranks in (("source", sources), ("destination", destinations))
        }
        for name in first["entered"]
    }
    versions = first["texts"]["versions"]
    return Outcome(
        model=story.checkpoint.name,
        parameters=first["numel"],
        model_nbytes=first["numel"] * torch.bfloat16.itemsize,
        question=story.question,
        source=str(story.source),
        destination=str(story.destination),
        before=first["texts"]["before"],
        answers=tuple(Answers(i, v["source"], v["destination"], v["agree"]) for i, v in enumerate(versions, 1)),
        refits=tuple(
            Refitted(i + 1, taken, sum(facts["landed"][i] for facts in every))
            for i, taken in enumerate(first["refits"])
        ),
        verified=not mismatches,
        mismatches=mismatches,
        step_loss=first["loss"],
        step_changed=first["changed"],
        seconds=tuple(sorted(seconds.items())),
        forms=tuple(forms.items()),
        compile_seconds=first["compile_seconds"],
        copies_per_domain=tuple(copies["reshard"].items()),
        copies_point_to_point=tuple(copies["point_to_point"].items()),
        ranks=tuple(facts["facts"] for facts in every),
        plan=first["plan"],
        notes=tuple(first["notes"]),
    )
