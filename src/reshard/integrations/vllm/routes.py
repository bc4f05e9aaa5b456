"""vLLM's HTTP routes as calls with a deadline; what a server answers instead of 200 becomes one of our errors."""

from __future__ import annotations

import http.client
import json
import re
import select
import threading
import time
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode, urlsplit

from reshard.errors import ConfigError, EnvironmentNotSupported, PeerError, RefitTimeout, TransportError
from reshard.transports.base import Deadline

if TYPE_CHECKING:
    import socket
    from collections.abc import Mapping

BACKEND_FLAG = """--weight-transfer-config '{"backend": "reshard"}'"""
"""What a server must be started with."""

DEV_MODE = "VLLM_SERVER_DEV_MODE=1"
"""What must be in its environment."""

_NEEDS = (
    f"Start it with {DEV_MODE} in its environment (vLLM has these routes only then) and with {BACKEND_FLAG}, where "
    f"reshard is installed beside vLLM"
)
_KEPT_SECONDS = 2.0
"""For which a connection is used again: well below the five after which vLLM closes one. A server whose streams keep it
busy takes its time to accept a new one, and within a pause that time counts."""

_BODY_CHARACTERS = 600
"""Of an answer that is not 200, in an error."""


class Routes:
    """One server.

    Args:
        url: ``http://host:port``, or https; a path before the routes is kept.
        timeout_seconds: For each call; the deadline of the refit holds besides.
        headers: Sent with every call, for a proxy that asks for a key.

    Raises:
        ConfigError: The URL cannot be read.
    """

    def __init__(self, url: str, timeout_seconds: float, headers: Mapping[str, str] | None = None) -> None:
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1 or parts.query:
            raise ConfigError(f"{url!r} is not the address of a server; use http://host:port.")
        self.url = url.rstrip("/")
        self._connection = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._host, self._port, self._path = parts.hostname, port, parts.path.rstrip("/")
        self._timeout_seconds = timeout_seconds
        self._headers = dict(headers or {})
        self._kept: tuple[http.client.HTTPConnection, float] | None = None
        """A connection that the next call may use, and since when nothing was asked over it."""
        self._lock = threading.Lock()

    def __del__(self) -> None:
        if getattr(self, "_lock", None) is not None:
            self._swap(None)

    def get(self, route: str, deadline: Deadline, **query: Any) -> Any:
        """What a route answers: JSON, or None for an empty body."""
        return self.call("GET", route, deadline, query, None)

    def post(self, route: str, deadline: Deadline, body: Mapping[str, Any] | None = None, **query: Any) -> Any:
        """As ``get``, with a body."""
        return self.call("POST", route, deadline, query, body)

    def call(
        self, method: str, route: str, deadline: Deadline, query: Mapping[str, Any], body: Mapping[str, Any] | None
    ) -> Any:
        """Make one request and read its answer.

        Raises:
            RefitTimeout: No whole answer within the deadline; the server may have done it all the same.
            TransportError: Nobody answers there, or the connection broke.
            EnvironmentNotSupported: The server lacks the route, or the weight transfer engine.
            PeerError: Any other status; ``error.status`` and ``error.body`` have it.
        """
        what = f"{method} {route}"
        if query:
            route = f"{route}?{urlencode(query)}"
        call_deadline = Deadline(min(self._timeout_seconds, deadline.remaining()))
        connection = self._connect(max(0.001, call_deadline.remaining()))
        is_kept = False
        try:
            payload = None if body is None else json.dumps(body).encode()
            headers = {**self._headers, "Content-Type": "application/json"} if payload else self._headers
            connection.request(method, self._path + route, payload, headers)
            sock = connection.sock  # the answer takes it over if the server does not keep the connection
            with connection.getresponse() as answer:
                text = _read(sock, answer, call_deadline)
            # After an error vLLM's server closes the connection although it has not said so.
            is_kept = not answer.will_close and answer.status == http.client.OK
        except TimeoutError as error:
            raise RefitTimeout(
                f"{what} had no answer for {call_deadline.seconds:.3g} s.", url=self.url, route=what
            ) from error
        except (OSError, http.client.HTTPException) as error:
            raise TransportError(
                f"{what} failed: {type(error).__name__}: {error}. The server must run and be reachable from here.",
                url=self.url,
                route=what,
            ) from error
        finally:
            if is_kept:
                self._swap((connection, time.monotonic()))
            else:
                connection.close()
        if answer.status != http.client.OK:
            raise _refusal(what, answer.status, text, self.url)
        try:
            return json.loads(text) if text else None
        except ValueError as error:
            raise PeerError(
                f"{what} answered {_short(text)!r}, which is not JSON: no vLLM server is there.",
                url=self.url,
                route=what,
            ) from error

    def _connect(self, timeout_seconds: float) -> http.client.HTTPConnection:
        """The connection of the call before, if it is fresh and the server has not closed it; or a new one."""
        with self._lock:
            kept, self._kept = self._kept, None
        if kept is not None:
            connection, since = kept
            is_fresh = time.monotonic() - since < _KEPT_SECONDS
            if is_fresh and not _is_readable(connection.sock, 0):
                connection.sock.settimeout(timeout_seconds)
                return connection
            connection.close()
        return self._connection(self._host, self._port, timeout=timeout_seconds)

    def _swap(self, kept: tuple[http.client.HTTPConnection, float] | None) -> None:
        """Keep a connection for the next call; one that was kept, and nobody has used, is closed."""
        with self._lock:
            before, self._kept = self._kept, kept
        if before is not None:
            before[0].close()


def _is_readable(sock: socket.socket, timeout_seconds: float) -> bool:
    """Whether something has come, or the end; ``select.select`` would not take a descriptor above 1023."""
    waiting = select.poll()
    waiting.register(sock, select.POLLIN)
    return bool(waiting.poll(timeout_seconds * 1000))


def _read(sock: socket.socket, answer: http.client.HTTPResponse, deadline: Deadline) -> str:
    """The whole body; a server that sends a little now and then does not move the deadline."""
    parts: list[bytes] = []
    while True:
        sock.settimeout(max(0.001, deadline.remaining()))
        part = answer.read1(1 << 16)
        if not part:
            return b"".join(parts).decode("utf-8", "replace")
        parts.append(part)
        if deadline.expired:
            raise TimeoutError


def _refusal(what: str, status: int, text: str, url: str) -> EnvironmentNotSupported | PeerError:
    """The error for an answer that is not 200."""
    message = _message(text)
    facts = {"url": url, "route": what, "status": status, "body": text}
    if status == http.client.NOT_FOUND:
        return EnvironmentNotSupported(
            f"{what} answered 404: this server has no such route. {_NEEDS}; vLLM before 0.30 does not have them at "
            f"all.",
            **facts,
        )
    if "Weight transfer not configured" in message:
        return EnvironmentNotSupported(
            f"{what} answered {status}: the server was started without a weight transfer engine. {_NEEDS}.", **facts
        )
    other = re.search(r"Invalid init_info for (\w+)", message)
    if other is not None:
        return EnvironmentNotSupported(
            f"{what} answered {status}: {message}. Its weight transfer engine is {other[1]}, of another backend or of "
            f"another release of reshard. {_NEEDS}.",
            **facts,
        )
    return PeerError(f"{what} answered {status}: {message}", **facts)


def _message(text: str) -> str:
    """What an answer says: vLLM wraps it in ``{"error": {"message": ...}}``, a route of its own in others."""
    try:
        told: Any = json.loads(text)
    except ValueError:
        return _short(text)
    for key in ("error", "message", "detail"):
        if isinstance(told, dict) and key in told:
            told = told[key]
    return _short(told if isinstance(told, str) else json.dumps(told))


def _short(text: str) -> str:
    text = text.strip()
    return text if len(text) <= _BODY_CHARACTERS else f"{text[:_BODY_CHARACTERS]}... ({len(text)} characters)"
