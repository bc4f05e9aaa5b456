"""What the processes of ``test_launch`` do: functions that a spawned process can import."""

from __future__ import annotations

import os
import threading

from reshard.errors import LayoutError, TransportError


def add(say, a, b):
    say(f"adding {a} and {b}", aloud=True)
    print("this goes to the log, not to stdout")
    return a + b


def read_variable(say, name):
    return os.environ.get(name)


def refuse(say):
    say("looking at the layout")
    raise LayoutError("'w': 3 rows cannot be cut.", tensor="w")


def lose_peer(say):
    raise TransportError("rank 7 is gone", peer=7)


def fail(say):
    print("a last word")
    raise ValueError("not a number")


def die(say):
    say("dying")
    os._exit(3)


def hang(say):
    say("hanging")
    threading.Event().wait()
