"""`muster logs`: live log lines of all processes of a stack, user code included.

Why over NATS: it is one place to subscribe to, wherever the processes run. Lines that are forwarded may have gaps (each
process reports its own); the complete log is what the processes write where they run.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final

import msgspec
import typer
from rich.console import Console
from rich.text import Text

from muster.cli.completion import complete_deployment
from muster.cli.output import print_json_line
from muster.cli.queries import NAME_HELP, stream_command
from muster.cli.session import Session
from muster.cli.terminal import get_console
from muster.client.requests import Feed, FeedMessage, StackAddress
from serve_common.errors import BadField
from serve_common.names import deployment_tag, short_name
from serve_common.protocol.reports import (
    ENCODING,
    KINDS,
    LEVELS,
    REPLAY_LINES_MAX,
    LogFilter,
    ReplayRecentLogs,
    get_kind,
    read_line,
)
from serve_common.protocol.subjects import RECALLED, Subjects

_STYLES: Final = {"debug": "dim", "warning": "yellow", "error": "red", "critical": "bold red"}
_SHOWN: Final = frozenset(
    (
        *("timestamp", "level", "event", "logger", "message", "exception", "stack", "traceback", "source"),
        *("service", "replica_tag", "backend_tag", "proxy_id", "host_id", "controller_id"),
    )
)
_USER_EVENTS: Final = ("log", "print")


def show_line(console: Console, line: Mapping[str, Any]) -> None:
    """Print time, level, process and message; then the remaining fields, and a traceback below."""
    level = str(line.get("level", ""))
    style = _STYLES.get(level, "")
    text = Text()
    text.append(f"{_get_time(line):<12} ", style="dim")
    text.append(f"{level.upper():<8} ", style=style)
    text.append(f"{get_process_name(line)} ", style="cyan")
    is_users = line.get("event") in _USER_EVENTS
    if is_users and line.get("event") == "log":
        text.append(f"{line.get('logger', '')}: ", style="bold")
    text.append(_text(line.get("message" if is_users else "event", "")), style=style)
    for name, value in line.items():
        if name not in _SHOWN or (not is_users and name in ("message", "logger")):
            text.append(f" {name}=", style="dim")
            text.append(_text(value))
    console.print(text, soft_wrap=True)
    for name in ("exception", "stack", "traceback"):
        if line.get(name):
            console.print(Text(_indented(_text(line[name])), style="dim"), soft_wrap=True)


def get_process_name(line: Mapping[str, Any]) -> str:
    """The process that logged the line."""
    if line.get("replica_tag"):
        return short_name(str(line["replica_tag"]))
    for name in ("proxy_id", "host_id", "controller_id"):
        if line.get(name):
            return str(line[name])
    return str(line.get("service", "?"))


def _get_time(line: Mapping[str, Any]) -> str:
    _, _, clock = str(line.get("timestamp", "")).partition("T")
    return clock[:12].rstrip("Z") or "-"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.rstrip().splitlines())


_REPLAY_S: Final = 0.7
"""Seconds for processes to send their retained lines."""


@stream_command
async def logs(
    session: Session,
    address: StackAddress,
    *,
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help=f"{NAME_HELP} Default: all processes.",
            autocompletion=complete_deployment,
        ),
    ] = None,
    service: Annotated[
        list[str] | None,
        typer.Option(
            "--service",
            metavar="KIND",
            help=f"Kind of process to show: {', '.join(KINDS)}; may be repeated. Default: all.",
        ),
    ] = None,
    host: Annotated[
        str | None, typer.Option("--host", metavar="HOST", help="Show only this host and its replicas.")
    ] = None,
    level: Annotated[
        str | None,
        typer.Option(
            "--level",
            metavar="LEVEL",
            help=f"Lowest level to show: {', '.join(LEVELS)}. Default: all levels.",
        ),
    ] = None,
    request_id: Annotated[
        str | None, typer.Option("--request-id", metavar="ID", help="Show only lines of this request.")
    ] = None,
    tail: Annotated[
        int,
        typer.Option(
            "--tail",
            metavar="N",
            min=0,
            max=10_000,
            help="Number of retained lines to show first, the newest of all processes together.",
        ),
    ] = 20,
    follow: Annotated[
        bool,
        typer.Option(
            "--follow/--no-follow",
            "-f",
            help="Continue with new lines until Ctrl-C, which is the default; --no-follow exits.",
        ),
    ] = True,
    as_json: bool = False,
) -> None:
    """Follow the log lines of all processes, those of user code included.

    Examples:
      muster logs digits
      muster logs digits --no-follow --level error
      muster logs --service proxy --level warning

    Each process retains its newest 200 lines. When a replica has stopped or crashed, its host retains the newest 50, of
    the last 64 such replicas. With --json, prints each as a line of JSON; so are those of deployments whose
    logging_config says encoding JSON.
    """
    wanted = LogFilter(
        kinds=_kinds(service, name),
        backend_tag="" if name is None else deployment_tag(name),
        host_id=host or "",
        level=_level(level),
        request_id=request_id or "",
    )
    log_tail = LogTail(wanted, Subjects(address.subject_prefix), as_json=as_json)
    async with session.listen(address, log_tail.subjects) as feed:
        await log_tail.replay_recent(feed, tail)
        while follow:
            message = await feed.receive()
            if message is not None:
                log_tail.show(message)


class LogTail:
    """Filters and prints the lines of one run of `muster logs`."""

    def __init__(self, wanted: LogFilter, subjects: Subjects, *, as_json: bool) -> None:
        self._wanted = wanted
        self._subjects = subjects
        self._as_json = as_json
        self._console = get_console()
        self._token = secrets.token_hex(8)

    @property
    def subjects(self) -> list[str]:
        """The subjects to subscribe to."""
        recalled = self._subjects.recalled_log(self._token)
        wanted = self._wanted
        if wanted.kinds == ("replica",) and wanted.backend_tag:
            return [self._subjects.logs("replica", wanted.backend_tag), recalled]
        return [*(self._subjects.logs(kind) for kind in wanted.kinds or KINDS), recalled]

    async def replay_recent(self, feed: Feed, tail: int) -> None:
        """Print the newest retained lines, then new lines that arrived while those were requested."""
        limit = min(tail, REPLAY_LINES_MAX)
        request = ReplayRecentLogs(token=self._token, limit=limit, filter=self._wanted)
        if limit:
            await feed.publish(self._subjects.log_replay, msgspec.json.encode(request))
        loop = asyncio.get_running_loop()
        deadline = loop.time() + (_REPLAY_S if limit else 0.0)
        recalled: dict[bytes, dict[str, Any]] = {}
        new: dict[bytes, dict[str, Any]] = {}
        while (left_s := deadline - loop.time()) > 0:
            message = await feed.receive(left_s)
            if message is not None:
                is_old = self._subjects.parse_log_kind(message.subject) == RECALLED
                (recalled if is_old else new).update(self._lines(message))
        old = [(data, line) for data, line in recalled.items() if data not in new]
        old.sort(key=lambda each: str(each[1].get("timestamp", "")))
        for data, line in [*old[-tail:], *new.items()]:
            self._show(data, line)

    def show(self, message: FeedMessage) -> None:
        """Print the lines of a message that match the filter; replies to `replay_recent` are skipped."""
        if self._subjects.parse_log_kind(message.subject) != RECALLED:
            for data, line in self._lines(message):
                self._show(data, line)

    def _lines(self, message: FeedMessage) -> Iterator[tuple[bytes, dict[str, Any]]]:
        kind = self._subjects.parse_log_kind(message.subject)
        if kind == RECALLED:
            kind = message.subject.rpartition(".")[2]
        for data in message.payload.splitlines():
            line = read_line(data)
            if self._wanted.matches(get_kind(line, kind), line):
                yield data, line

    def _show(self, data: bytes, line: dict[str, Any]) -> None:
        if self._as_json or ENCODING in line:
            print_json_line(data.decode(errors="replace"))
        else:
            show_line(self._console, line)


def _kinds(services: list[str] | None, name: str | None) -> tuple[str, ...]:
    for service in services or ():
        if service not in KINDS:
            raise BadField("--service", f"{service!r} is none of {', '.join(KINDS)}")
    if services:
        return tuple(dict.fromkeys(services))
    return ("replica",) if name is not None else ()


def _level(level: str | None) -> str:
    if level is None:
        return ""
    if level.lower() not in LEVELS:
        raise BadField("--level", f"{level!r} is none of {', '.join(LEVELS)}")
    return level.lower()
