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

import json
import logging
import resource
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from reshard.demo.engine import Engine, Ranks
from reshard.demo.launch import Job, run_jobs
from reshard.demo.outcome import Answers, Outcome, Refitted
from reshard.demo.story import Member, Say, Story
from reshard.demo.together import STRATEGIES, Together
from reshard.demo.usual_way import FORMS
from reshard.demo.worlds import check_ranks
from reshard.errors import EnvironmentNotSupported
from reshard.layouts.manifest import Manifest
from reshard.transports.shm import share_memory_

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from reshard.demo.trainer import Trainer

GARBAGE_TOKENS = 8

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",  # the model is a folder; nothing is to be fetched
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
"""Of every process: ranks share the cores of one machine."""


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
    us = Member(say, story, "source", rank, host, port)
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
        together = Together(us, src=Manifest.from_torch(trainer.model), held=list(trainer.held()), trainer=trainer)
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
    us = Member(say, story, "destination", rank, host, port)
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
        together = Together(us, dst=Manifest.from_views(views), views=views, engine=engine)
        together.refit_and_compare(answer)
        together.refit_again(answer)
        us.collect([json.dumps(answers)])
        return together.facts(engine.nbytes)


def _prepare_process() -> None:
    """Make this process one of many on a small machine, and let it keep many tensors' memory open."""
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


__all__ = ["ENVIRONMENT", "GARBAGE_TOKENS", "STRATEGIES", "Say", "Story", "destination_rank", "run_demo", "source_rank"]
