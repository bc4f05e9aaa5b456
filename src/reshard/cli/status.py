"""``reshard status``: a running session from any shell: what each rank serves, its phase, and whom it waits for."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from reshard.cli.output import emit_json, json_option, seconds
from reshard.errors import MembershipError
from reshard.refit.status import list_sessions, prefix_of, read_status
from reshard.units import format_seconds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reshard.refit.status import MemberStatus

EXIT_NO = 1


@click.command(epilog="Example: reshard status tcp://10.0.0.7:29400")
@click.argument("store")
@click.option("--session", help="Its name; all sessions of the store if not given.")
@click.option("--timeout", default="10", type=seconds, metavar="SECONDS", show_default=True, help="To reach the store.")
@json_option
def status(store: str, session: str | None, timeout: float, as_json: bool) -> None:
    """Show what every member of a session is doing.

    STORE is the address that serve_store gave. Nothing is changed there. Exit code 1 if a destination rank does not
    serve what the newest of its session does.
    """
    from reshard.refit.store import open_store, prefixed
    from reshard.transports.base import Deadline

    opened = open_store(store, Deadline.after(timeout))
    names = list_sessions(opened)
    if session is not None and session not in names:
        known = ", ".join(map(repr, names)) or "none"
        raise MembershipError(f"No session {session!r} has met at {store}; known there: {known}.")
    shown = {name: read_status(prefixed(opened, prefix_of(name))) for name in names if session in (None, name)}
    if as_json:
        emit_json({name: [member.to_json() for member in members] for name, members in shown.items()})
    else:
        now = time.time()
        for name, members in shown.items():
            click.echo("\n".join(lines_of(name, members, now)))
        if not shown:
            click.echo(f"No session has met at {store} yet.")
    if any(member.not_ready for members in shown.values() for member in members):
        raise click.exceptions.Exit(EXIT_NO)


def lines_of(session: str, members: Sequence[MemberStatus], now: float) -> list[str]:
    """A session as a table, one line a member.

    Args:
        session: Its name.
        members: What they said.
        now: Seconds since 1970, to tell for how long they have been doing that.
    """
    rows = [("member", "version", "phase", "for", "waits for", "where")]
    for member in members:
        version = "-" if member.version is None else str(member.version)
        version += " in part" if member.partial else ""
        version += ", torn" if member.torn else ""
        phase = member.phase if member.target is None else f"{member.phase} {member.target}"
        since = "-" if member.since is None else format_seconds(max(0.0, now - member.since))
        waits = ", ".join(member.waiting_for[:3]) + (
            f" and {len(member.waiting_for) - 3} more" * (len(member.waiting_for) > 3)
        )
        rows.append((member.name, version, phase, since, waits or "-", member.where or "-"))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [f"session {session!r}, epoch {max((m.epoch for m in members), default=0)}"]
    lines += ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines += [f"{member.name} is not ready: {member.not_ready}" for member in members if member.not_ready]
    lines += [f"{member.name}: {member.error.splitlines()[0]}" for member in members if member.error]
    return lines
