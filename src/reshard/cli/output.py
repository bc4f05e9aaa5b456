"""How every verb reads sizes and prints results: JSON on stdout for machines, progress on stderr for people."""

from __future__ import annotations

import json
import sys
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from reshard.errors import ConfigError
from reshard.units import parse_nbytes

if TYPE_CHECKING:
    from collections.abc import Callable

json_option: Callable[[Callable[..., Any]], Callable[..., Any]] = click.option(
    "--json", "as_json", is_flag=True, help="Print the result as one line of JSON."
)
"""The option that every verb has; the verb's parameter is ``as_json``."""


def size(value: str | int) -> int:
    """Read an option's value such as ``512MiB`` into bytes: ``click.option(..., type=size)``.

    Raises:
        click.BadParameter: The text is no size; the command ends with exit code 2.
    """
    try:
        return parse_nbytes(value)
    except ConfigError as error:
        raise click.BadParameter(str(error)) from error


def size_above_zero(value: str | int) -> int:
    """As ``size``, where 0 would make no sense.

    Raises:
        click.BadParameter: The text is no size, or 0; the command ends with exit code 2.
    """
    nbytes = size(value)
    if not nbytes:
        raise click.BadParameter(f"{value!r} is nothing. Give at least 1 byte, as in '8MiB'.")
    return nbytes


def seconds(value: str | float) -> float:
    """Read an option's value such as ``2.5e-6`` into seconds.

    Raises:
        click.BadParameter: The text is no length of time; the command ends with exit code 2.
    """
    try:
        length = float(value)
    except ValueError:
        length = -1.0
    if not 0 <= length < inf:
        raise click.BadParameter(f"{value!r} is not a length of time. Give seconds, 0 or more, as in '2.5e-6'.")
    return length


def emit_json(value: object) -> None:
    """Print a result on stdout: keys sorted, one line, so that equal results are equal bytes.

    Raises:
        ValueError: It holds a NaN or an infinity, which JSON has no word for.
    """
    click.echo(json.dumps(value, sort_keys=True, ensure_ascii=False, allow_nan=False))


def json_in_lines(value: object, *, width: int = 120) -> str:
    """JSON with a line for each row of a table: files that can be read, searched and compared by line.

    What fits into the width stands on one line, and so does a list that is not a list of lists.

    >>> print(json_in_lines({"name": "a", "rows": [[1, 2, 3], [4, 5, 6]]}, width=20))
    {
    "name": "a",
    "rows": [
    [1, 2, 3],
    [4, 5, 6]
    ]
    }
    """
    text = json.dumps(value, ensure_ascii=False)
    if len(text) <= width or not isinstance(value, (dict, list)):
        return text
    if isinstance(value, list) and sum(isinstance(row, (dict, list)) for row in value) < 2:
        return text
    if isinstance(value, dict):
        rows = [f"{json.dumps(key, ensure_ascii=False)}: {json_in_lines(value[key], width=width)}" for key in value]
        return "{\n" + ",\n".join(rows) + "\n}"
    return "[\n" + ",\n".join(json_in_lines(row, width=width) for row in value) + "\n]"


def stderr_console() -> Console:
    """Give a rich console for progress and remarks: on stderr, without colour where NO_COLOR is set."""
    return Console(stderr=True, highlight=False)


def write_text(text: str, output: str) -> None:
    """Write to a file, or to stdout where ``output`` is "-".

    Raises:
        ConfigError: The file cannot be written.
    """
    if output == "-":
        sys.stdout.write(text)
        return
    try:
        Path(output).write_text(text, "utf-8")
    except OSError as error:
        raise ConfigError(f"{output} cannot be written: {error.strerror}.") from error
