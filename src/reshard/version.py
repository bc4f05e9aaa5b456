"""The library's version: it is part of every plan's digest, since two versions may plan differently."""

__version__ = "0.1.0"
