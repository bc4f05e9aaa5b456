"""Names: rules that bring the names of a model to those that both sides use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, TypeAlias

from reshard.errors import ConfigError, ManifestError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from reshard.layouts.manifest import Manifest

Rename: TypeAlias = Mapping[str, str] | Callable[[str], str | None]
"""Rules, or a function from a name to the new one; None, or an empty text, leaves the tensor out."""

WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Parts of a name that torch's wrappers add (compile, FSDP, activation checkpoints): no checkpoint has them."""


def new_name(name: str, rules: Rename) -> str | None:
    """What a tensor is called by the rules; None where it is left out.

    A rule ``"model.": "language_model."`` replaces the beginning of a name, ``".base_layer.": "."`` a part anywhere,
    any other a whole name. Whole names come first, then parts in the order given, then the longest beginning.

    >>> new_name("base_model.q_proj.base_layer.weight", {"base_model.": "", ".base_layer.": "."})
    'q_proj.weight'
    """
    if callable(rules):
        return rules(name) or None
    if name in rules:
        return rules[name] or None
    for part, new in rules.items():
        if part.startswith(".") and part.endswith("."):
            name = name.replace(part, new)
    prefixes = [p for p in rules if p.endswith(".") and not p.startswith(".") and name.startswith(p)]
    if prefixes:
        longest = max(prefixes, key=len)
        name = rules[longest] + name[len(longest) :]
    return name or None


def without_wrappers(names: Iterable[str]) -> dict[str, str]:
    """Each name without what torch's wrappers add; ``module.`` of data parallelism only where every name has it.

    >>> without_wrappers(["module._orig_mod.w", "module.b"])
    {'module._orig_mod.w': 'w', 'module.b': 'b'}
    """
    listed = list(names)
    bare = {name: ".".join(part for part in name.split(".") if part not in WRAPPERS) for name in listed}
    while bare and all(name.startswith("module.") for name in bare.values()):
        bare = {name: short.removeprefix("module.") for name, short in bare.items()}
    return bare


def renamed(manifest: Manifest, rules: Rename | None) -> tuple[Manifest, dict[str, str]]:
    """A manifest under new names, and what each changed name was before.

    Raises:
        ConfigError: No rules.
        ManifestError: Two tensors would have one name; all such pairs are listed.
    """
    if not (rules is None or callable(rules) or isinstance(rules, Mapping)):
        raise ConfigError(f"rename={rules!r}: give rules from name to name, or a function.")
    bare = without_wrappers(manifest.names)
    to = {name: short if rules is None else new_name(short, rules) for name, short in bare.items()}
    by_new: dict[str, list[str]] = {}
    for old, new in to.items():
        if new is not None:
            by_new.setdefault(new, []).append(old)
    tied = {frozenset(pair) for pair in manifest.aliases}
    doubled = {new: olds for new, olds in by_new.items() if len(olds) > 1}
    if doubled:
        lines = [f"{', '.join(map(repr, olds))} would all be {new!r}." for new, olds in sorted(doubled.items())]
        hint = " (they are one buffer: leave one out)" if any(frozenset(o) in tied for o in doubled.values()) else ""
        raise ManifestError(
            "\n".join(
                [
                    *lines[:20],
                    f"A name is one tensor{hint}: make the rule in rename= tell them apart, or map all but one to ''.",
                ]
            ),
            tensors=tuple(sorted(doubled)),
        )
    keep = {old: new for old, new in to.items() if new is not None}
    changed = {new: old for old, new in keep.items() if old != new}
    if not changed and len(keep) == len(to):
        return manifest, {}
    return (
        replace(
            manifest,
            entries=tuple(
                replace(e, spec=replace(e.spec, name=keep[e.spec.name]))
                for e in manifest.entries
                if e.spec.name in keep
            ),
            aliases=tuple((keep[a], keep[b]) for a, b in manifest.aliases if a in keep and b in keep),
            local=tuple(
                replace(b, piece=replace(b.piece, name=keep[b.piece.name]))
                for b in manifest.local
                if b.piece.name in keep
            ),
            unread=tuple((keep[name], rank, local) for name, rank, local in manifest.unread if name in keep),
            owner=None,  # it knows the old names only
        ),
        changed,
    )


def matching(names: Iterable[str], patterns: Sequence[str]) -> tuple[str, ...]:
    """The names that match any of the patterns (``*`` and ``?`` as in a shell)."""
    return tuple(name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns))
