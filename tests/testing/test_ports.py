"""Ports that a program is told to serve at later on."""

import socket

from reshard.testing import ports


def test_they_are_free_and_none_of_those_that_the_system_hands_out():
    first_ephemeral = int(ports._RANGE.read_text().split()[0])
    found = {ports.free_port() for _ in range(20)}
    assert len(found) > 15
    assert all(1024 < port < first_ephemeral for port in found)
    for port in found:
        with socket.create_server(("127.0.0.1", port)):
            pass


def test_one_that_somebody_has_is_not_given(monkeypatch):
    taken, free = sorted(ports.free_port() for _ in range(2))
    tried = []

    class Chosen:
        def randrange(self, *_):
            tried.append(taken if not tried else free)
            return tried[-1]

    monkeypatch.setattr(ports, "SystemRandom", Chosen)
    with socket.create_server(("127.0.0.1", taken)):
        assert ports.free_port() == free
    assert tried == [taken, free]
