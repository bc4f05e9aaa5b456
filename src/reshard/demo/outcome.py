"""Outcome: what the demo measured and proved, as plain values, and how it is told to machines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Refitted:
    """One refit of all ranks."""

    version: int
    seconds: float
    """Of the slowest rank."""
    nbytes: int
    """Bytes that reached a destination rank from another rank."""


@dataclass(frozen=True, slots=True)
class Answers:
    """What was said about one version of the weights."""

    version: int
    source: str
    destination: str
    """Of the first replica; ``agree`` says whether the others said the same."""
    agree: bool
    """Whether all replicas gave the source's answer, token by token."""


@dataclass(frozen=True, slots=True)
class RankFacts:
    """What one rank did in a refit. Bytes."""

    world: str
    rank: int
    holds: int
    """Its pieces: what its buffers have of the model."""
    staging: int
    sent: int
    """Sent, or read in place by others."""
    received: int
    """Received, or read in place from others."""
    links: tuple[tuple[str, str], ...]
    """(other rank, how its bytes came or went)."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """All that one run of the demo has to tell."""

    model: str
    parameters: int
    model_nbytes: int
    question: str
    source: str
    destination: str
    before: str
    """The destination's answer from poisoned buffers."""
    answers: tuple[Answers, ...]
    refits: tuple[Refitted, ...]
    verified: bool
    """Whether every element was the source's, bit for bit, after both refits and after every timed run."""
    mismatches: tuple[str, ...]
    """Where it was not."""
    step_loss: float
    step_changed: int
    seconds: tuple[tuple[str, float], ...]
    """Median of the rounds, of the slowest rank: by the names of ``--json``."""
    forms: tuple[tuple[str, float], ...]
    """The same for every form of the usual way."""
    compile_seconds: float
    """Spent once, before the first refit: manifests, plan, connections."""
    copies_per_domain: tuple[tuple[str, float], ...]
    """Copies of the model that entered each world with reshard, where each world is a host of its own."""
    copies_point_to_point: tuple[tuple[str, float], ...]
    """The same point to point."""
    ranks: tuple[RankFacts, ...]
    plan: str
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether the weights arrived and the answers are the source's."""
        return self.verified and all(answer.agree for answer in self.answers)

    @property
    def usual_form(self) -> str:
        """The fastest form of the usual way."""
        return min(self.forms, key=lambda form: form[1])[0]

    def to_json(self) -> dict[str, Any]:
        """Plain data for ``--json``."""
        first, *later = self.answers
        return {
            "model": self.model,
            "parameters": self.parameters,
            "model_nbytes": self.model_nbytes,
            "verified": self.verified,
            "mismatches": list(self.mismatches),
            "question": self.question,
            "answer": {"source": first.source, "before": self.before, "after": first.destination},
            "later_answers": [
                {"version": a.version, "source": a.source, "after": a.destination, "agree": a.agree} for a in later
            ],
            "refits": [{"version": r.version, "seconds": r.seconds, "nbytes": r.nbytes} for r in self.refits],
            "seconds": dict(self.seconds),
            "usual_way": {"forms": dict(self.forms), "fastest": self.usual_form},
            "compile_seconds": self.compile_seconds,
            "copies_per_domain": dict(self.copies_per_domain),
            "copies_per_domain_point_to_point": dict(self.copies_point_to_point),
            "worlds": {"source": self.source, "destination": self.destination},
            "optimizer_step": {"loss": self.step_loss, "changed_elements": self.step_changed},
            "ranks": [
                {
                    "world": r.world,
                    "rank": r.rank,
                    "holds_nbytes": r.holds,
                    "staging_nbytes": r.staging,
                    "sent_nbytes": r.sent,
                    "received_nbytes": r.received,
                    "links": dict(r.links),
                }
                for r in self.ranks
            ],
            "plan": self.plan,
            "notes": list(self.notes),
        }
