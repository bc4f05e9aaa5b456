"""Every exception that reshard raises on purpose.

A message says what is wrong with its values, then the rule, then the way out. The facts are attributes too, so that a
program need not parse the text: ``error.tensor``, ``error.rank``, ``error.peer`` and so on, where they apply.
"""

from __future__ import annotations


class ReshardError(Exception):
    """Base of all errors raised on purpose; ``facts`` holds the values that the message names."""

    def __init__(self, message: str, **facts: object) -> None:
        super().__init__(message)
        self.message = message
        self.facts = facts
        for name, value in facts.items():
            setattr(self, name, value)

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild, (type(self), self.message, self.facts))


def _rebuild(kind: type[ReshardError], message: str, facts: dict[str, object]) -> ReshardError:
    return kind(message, **facts)


class ConfigError(ReshardError):
    """An option has a value that cannot work."""


class LayoutError(ReshardError):
    """A mesh, placement or layout cannot describe this tensor."""


class ManifestError(ReshardError):
    """What the two worlds declare does not fit together (names, shapes, dtypes, owners)."""


class CoverageError(ManifestError):
    """A destination box, or a part of one, is held by no source rank."""


class PlanError(ReshardError):
    """No plan can be made under these options."""


class ProofError(ReshardError):
    """A plan was replayed and does not do what it must: this is a fault of the plan, nothing was sent."""


class ScheduleError(ReshardError):
    """No schedule fits the staging memory or the open operations that were allowed."""


class BindingError(ReshardError):
    """A piece does not lie in this rank's memory as declared (missing, rebound, aliased)."""


class DigestError(ReshardError):
    """The ranks do not agree on what is to be done; nothing was sent."""


class PeerError(ReshardError):
    """Another rank refused or failed; ``rank`` names it and ``cause`` carries its message."""


class TransportError(ReshardError):
    """A peer was lost or bytes did not arrive; ``peer`` names the other end."""


class RefitTimeout(TransportError):
    """A deadline expired; the message names who was waited for."""


class VerifyError(ReshardError):
    """Bytes that landed are not the bytes that were sent."""


class MembershipError(ReshardError):
    """The members that came are not those that were expected: some are missing, there twice, or not expected."""


class VersionError(ReshardError):
    """The version asked for may not follow the one that is served; nothing was sent."""


class InstallError(ReshardError):
    """What has landed could not be made live; ``untouched`` says whether nothing of the live weights was written."""


class EnvironmentNotSupported(ReshardError):
    """This machine or installation lacks something that the request needs."""
