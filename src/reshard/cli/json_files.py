"""JSON that the caller names, a file or stdin, and what the library reads from it; errors name the file."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from reshard.errors import ConfigError, ReshardError

if TYPE_CHECKING:
    from collections.abc import Callable

Made = TypeVar("Made")

MALFORMED = (KeyError, TypeError, ValueError, IndexError, AttributeError)
"""What reading raises where JSON of one kind is taken for another."""


def read_json(path: str) -> Any:
    """Read JSON from a file, or from stdin for ``-``.

    Raises:
        ConfigError: There is no such file, or it is not JSON.
    """
    try:
        text = sys.stdin.read() if path == "-" else Path(path).read_text("utf-8")
        return json.loads(text)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:  # not JSON, or not even text
        raise ConfigError(f"{called(path)} is not JSON: {error}.") from error


def made_from(data: Any, path: str, make: Callable[[Any], Made], what: str, kind: type[ReshardError]) -> Made:
    """What ``make`` reads from the JSON of a file.

    Args:
        data: The file's content.
        path: Its name as the caller wrote it.
        make: Such as ``Plan.from_json``.
        what: What the file should be, with its article: ``a saved plan (Plan.to_json)``.
        kind: Of the error where it is something else altogether.

    Raises:
        ReshardError: What ``make`` raises on purpose, with the file's name before it; or ``kind``.
    """
    if not isinstance(data, dict):
        raise kind(f"{called(path)} is not {what}: it holds no JSON object.")
    try:
        return make(data)
    except ReshardError as error:
        raise type(error)(f"{called(path)}: {error.message}", **error.facts) from error
    except MALFORMED as error:
        why = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise kind(f"{called(path)} is not {what}: {why}.") from error


def called(path: str) -> str:
    """How a message names the file."""
    return "stdin" if path == "-" else path
