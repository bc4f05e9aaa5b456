"""Read and print byte counts, rates and durations: ``"512MiB"`` -> 536870912 -> ``"512 MiB"``."""

from __future__ import annotations

import re

from reshard.errors import ConfigError

_BINARY = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40, "PIB": 2**50}
_DECIMAL = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "PB": 10**15}
_SIZES = {**_BINARY, **_DECIMAL, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_BITS_PER_SECOND = {"bit": 1, "kbit": 10**3, "mbit": 10**6, "gbit": 10**9, "tbit": 10**12}


def parse_nbytes(text: str | int) -> int:
    """Read a byte count; an int passes through.

    Raises:
        ConfigError: The text is not a non-negative number with a known unit, or not a whole number of bytes.

    >>> parse_nbytes("512MiB"), parse_nbytes("1.5 GiB"), parse_nbytes("2GB"), parse_nbytes(7)
    (536870912, 1610612736, 2000000000, 7)
    """
    if isinstance(text, int):
        if text < 0:
            raise ConfigError(f"{text} bytes: a size is not negative.", value=text)
        return text
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", text) if isinstance(text, str) else None
    unit = match.group(2).upper() if match else ""
    if match is None or unit not in _SIZES:
        raise ConfigError(f"{text!r} is not a size. Write a number and a unit, as in '512MiB' or '2GB'.", value=text)
    nbytes = float(match.group(1)) * _SIZES[unit] if "." in match.group(1) else int(match.group(1)) * _SIZES[unit]
    if nbytes != int(nbytes):
        raise ConfigError(f"{text!r} is {nbytes} bytes, which is not a whole number of bytes.", value=text)
    return int(nbytes)


def parse_rate(text: str) -> int:
    """Read a link's rate into bits per second.

    Raises:
        ConfigError: The text is no positive number with a unit.

    >>> parse_rate("2Gbit"), parse_rate("1.5 Mbit/s")
    (2000000000, 1500000)
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]+?)(?:/s|ps)?\s*", text)
    unit = match.group(2).lower() if match else ""
    bits = round(float(match.group(1)) * _BITS_PER_SECOND.get(unit, 0)) if match else 0
    if bits < 8:
        raise ConfigError(f"{text!r} is not a rate. Write a number and a unit, as in '2Gbit' or '500Mbit'.", value=text)
    return bits


def format_nbytes(nbytes: int) -> str:
    """Print a byte count with a binary unit and at most two decimals.

    >>> format_nbytes(536870912), format_nbytes(1000), format_nbytes(1536), format_nbytes(-2048)
    ('512 MiB', '1000 B', '1.5 KiB', '-2 KiB')
    """
    size = abs(nbytes)
    for unit, scale in (("PiB", 2**50), ("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= scale:
            return f"{nbytes / scale:.2f}".rstrip("0").rstrip(".") + f" {unit}"
    return f"{nbytes} B"


def count(number: int, one: str, many: str | None = None) -> str:
    """A number with its noun.

    >>> count(1, "tensor"), count(3, "class", "classes")
    ('1 tensor', '3 classes')
    """
    return f"{number} {one if number == 1 else many or one + 's'}"


def format_seconds(seconds: float) -> str:
    """Print a duration with three significant digits.

    >>> format_seconds(0.0000123), format_seconds(0.0456), format_seconds(2.5), format_seconds(600)
    ('12.3 us', '45.6 ms', '2.5 s', '600 s')
    """
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(seconds) >= scale or unit == "us":
            value = seconds / scale
            return (f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}") + f" {unit}"
    raise AssertionError("unreachable")
