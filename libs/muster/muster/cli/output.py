"""Text for people, lines for logs, JSON for programs: what goes where, and how tables, times and amounts look."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import sys
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Final, Self, TextIO, cast

import msgspec
import typer
from rich import box
from rich.console import Console
from rich.segment import Segment
from rich.status import Status
from rich.table import Table
from rich.text import Text

from muster.cli import parsing as values_given
from serve_common.api.views import ReplicaView
from serve_common.config.backend import BackendConfig
from serve_common.config.endpoint import METHODS
from serve_common.config.replica import RayActorOptions, ReplicaConfig

_PIPED_WIDTH = 200
"""Columns for tables that no terminal limits."""
_BRIEF_MAX = 160
_TRACEBACK_BEGINS = "Traceback (most recent call last):"


_OBEYED: Final = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""What moves the cursor, colours, writes titles or turns text around, C1 bytes among it; also half characters, which
cannot be written. Line breaks and tabs are none of it."""


def plain(text: str) -> str:
    """``text`` as it may be printed: what a terminal would obey is shown as �."""
    return _OBEYED.sub("�", text.replace("\r\n", "\n"))


def print_json(value: Any) -> None:
    """One JSON document on standard output."""
    typer.echo(_escaped(json.dumps(msgspec.to_builtins(value), indent=2, ensure_ascii=False)))


def print_json_line(document: str) -> None:
    """A JSON document, which has its final form, in a line on standard output."""
    typer.echo(_escaped(document))


def _escaped(document: str) -> str:
    """The same JSON without anything in it that a terminal would obey."""
    return _OBEYED.sub(lambda found: f"\\u{ord(found[0]):04x}", document)


def say(text: str) -> None:
    """A line of the result."""
    typer.echo(plain(text))


def complain(text: str) -> None:
    """A line on standard error."""
    typer.echo(plain(text), err=True)


class _PlainConsole(Console):
    """Writes texts as `plain` has them; what rich itself tells the terminal stays."""

    def _render_buffer(self, buffer: Iterable[Segment]) -> str:
        return super()._render_buffer(
            segment if segment.control else Segment(plain(segment.text), segment.style) for segment in buffer
        )


def stderr_for_logs() -> TextIO:
    """Standard error, which keeps it for itself when it can take nothing: a full disk must not end who logs."""
    # It has what is used of a file.
    return cast("TextIO", _Stderr())


class _Stderr:
    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            sys.stderr.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            sys.stderr.flush()


def get_console() -> Console:
    """Standard output for tables."""
    return _PlainConsole(width=None if sys.stdout.isatty() else _PIPED_WIDTH, highlight=False)


def write_body(body: bytes) -> None:
    """An answer on standard output: as it came, but for a terminal as `plain` has it."""
    if sys.stdout.isatty():
        say(body.decode(errors="replace").removesuffix("\n"))
    else:
        sys.stdout.buffer.write(body)
        sys.stdout.flush()


class PlainFormatter(logging.Formatter):
    """Log lines of libraries, which quote what others say."""

    def format(self, record: logging.LogRecord) -> str:
        """As `logging.Formatter.format`."""
        return plain(super().format(record))


def plain_event(_logger: object, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """A structlog processor that does it to all fields."""
    return {name: plain(value if isinstance(value, str) else repr(value)) for name, value in event.items()}


def brief(text: str) -> str:
    """A long text in one line: of a traceback the exception, which is its last line."""
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    if not lines:
        return ""
    first = lines[0].replace(_TRACEBACK_BEGINS, "").strip()
    words = first if len(lines) == 1 else f"{first} … {lines[-1]}".removeprefix(" … ")
    return words if len(words) <= _BRIEF_MAX else f"{words[: _BRIEF_MAX - 1]}…"


def short_name(tag: str) -> str:
    """A deployment's name as its user typed it: without the application ``default``."""
    return tag.removeprefix("default/")


class Progress:
    """What is waited for: a live line on a terminal, otherwise a line whenever it changes."""

    def __init__(self, title: str) -> None:
        """``title`` stands before every text."""
        self._title = title
        self._console = _PlainConsole(stderr=True, highlight=False)
        self._status: Status | None = None
        self._last = ""

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._status = self._console.status(Text(self._title))
            self._status.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """There is something to show now; what is said after this is a line."""
        if self._status is not None:
            self._status.stop()
            self._status = None

    def say(self, text: str) -> None:
        """Show what is waited for now; the same text again is not repeated."""
        text = brief(text)
        if not text or text == self._last:
            return
        self._last = text
        line = f"{self._title}: {text}"
        if self._status is not None:
            self._status.update(Text(line))
        else:
            complain(line)


_STYLES = {
    **dict.fromkeys(("healthy", "live", "running", "succeeded", "start"), "green"),
    **dict.fromkeys(("updating", "starting", "should_start", "suspect", "leaving", "pending"), "yellow"),
    **dict.fromkeys(("draining", "deleting", "reconfigure", "superseded"), "yellow"),
    **dict.fromkeys(("unhealthy", "lost", "failed", "stop"), "red"),
}
_RUNNING = frozenset({"running", "updating"})


def table(*columns: str) -> Table:
    """An empty table."""
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for column in columns:
        made.add_column(column, overflow="fold")
    return made


def styled(value: str) -> Text:
    """A word for a state in its colour."""
    return Text(value, style=_STYLES.get(value, ""))


def print_table(title: str, rows: Table) -> None:
    """A table under its title, or a line that there is none."""
    console = get_console()
    if rows.row_count:
        console.print(Text(title, style="bold"))
        console.print(rows)
        console.print()
    else:
        console.print(Text(f"{title}: none", style="bold"))


def print_facts(facts: Mapping[str, str]) -> None:
    """Names and values in two columns; empty values are left out."""
    rows = Table(box=None, show_header=False, pad_edge=False)
    for title, value in facts.items():
        if value:
            rows.add_row(Text(title, style="bold"), styled(value))
    get_console().print(rows)


def print_replicas(replicas: Sequence[ReplicaView]) -> None:
    """Each replica in a row."""
    rows = table("replica", "state", "host", "version", "message")
    for replica in replicas:
        rows.add_row(
            Text(short_name(replica.replica_tag)),
            styled(replica.state),
            Text(replica.host_id or "-"),
            Text(replica.version or "-"),
            Text(brief(replica.message)),
        )
    print_table("Replicas", rows)


def counts(replicas: Sequence[ReplicaView], config: BackendConfig) -> str:
    """How many run, of how many."""
    return f"{sum(replica.state in _RUNNING for replica in replicas)}/{config.num_replicas}"


def config_facts(backend_config: BackendConfig, replica_config: ReplicaConfig) -> dict[str, str]:
    """Both configurations field by field, under the names that they have everywhere."""
    return {**facts_of(replica_config), **facts_of(backend_config)}


def facts_of(fields: msgspec.Struct) -> dict[str, str]:
    """Every field that says something, under its name."""
    named = msgspec.structs.asdict(fields)
    return {name: value_text(value) for name, value in named.items() if value not in ("", [], {}, None)}


def methods_text(methods: Sequence[str]) -> str:
    """HTTP methods, in a word where there are all of them."""
    return "all" if set(methods) == set(METHODS) else ", ".join(methods)


def value_text(value: Any) -> str:
    """A user's value: text as it is, a group of fields as its option takes it, anything else as JSON."""
    if isinstance(value, msgspec.Struct) and not isinstance(value, RayActorOptions):
        return values_given.group_text(value)
    plain = msgspec.to_builtins(value)
    return plain if isinstance(plain, str) else msgspec.json.encode(plain).decode()


def moment(at: float | None) -> str:
    """Seconds since 1970 as a date and time in UTC, as logs have it."""
    return "-" if at is None else datetime.fromtimestamp(at, tz=UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def shares(amounts: Mapping[str, float]) -> str:
    """Weights or proportions by name."""
    return ", ".join(f"{short_name(name)}={amount:g}" for name, amount in sorted(amounts.items())) or "-"
