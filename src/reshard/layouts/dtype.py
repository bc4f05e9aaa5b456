"""Dtypes by their torch names, and how many bytes an element takes; torch itself is not needed.

Packed dtypes (``float4_e2m1fn_x2``, ``bits1x8``) count one element a byte, as torch does.
"""

from __future__ import annotations

from reshard.errors import LayoutError

ITEMSIZE: dict[str, int] = {
    **dict.fromkeys(("bool", "uint8", "int8", "quint8", "qint8", "quint4x2", "quint2x4"), 1),
    **dict.fromkeys(("bits8", "bits4x2", "bits2x4", "bits1x8", "float4_e2m1fn_x2"), 1),
    **dict.fromkeys((f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)), 1),
    **dict.fromkeys(("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"), 1),
    **dict.fromkeys(("int16", "uint16", "float16", "bfloat16", "bits16"), 2),
    **dict.fromkeys(("int32", "uint32", "float32", "complex32", "qint32"), 4),
    **dict.fromkeys(("int64", "uint64", "float64", "complex64"), 8),
    "complex128": 16,
}
"""Bytes an element takes, by torch's own name of the dtype."""

_ALIASES = {
    "half": "float16",
    "float": "float32",
    "double": "float64",
    "short": "int16",
    "int": "int32",
    "long": "int64",
    "chalf": "complex32",
    "cfloat": "complex64",
    "cdouble": "complex128",
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp32": "float32",
    "BF16": "bfloat16",
    "F16": "float16",
    "F32": "float32",
}


def dtype_name(dtype: object) -> str:
    """The plain name of a dtype, given a name or a ``torch.dtype``.

    >>> dtype_name("torch.bfloat16"), dtype_name("half")
    ('bfloat16', 'float16')

    Raises:
        LayoutError: No dtype has this name.
    """
    name = str(dtype).removeprefix("torch.")
    name = _ALIASES.get(name, name)
    if name not in ITEMSIZE:
        raise LayoutError(f"{name!r} is not a dtype that reshard knows. Known: {', '.join(sorted(ITEMSIZE))}.")
    return name
