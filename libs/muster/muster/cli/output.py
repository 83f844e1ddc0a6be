"""Output of commands: text and tables for people, lines for logs, JSON for programs.

Results go to standard output and everything else to standard error, so that output can be piped. Texts that come from
users (tracebacks, names) are never read as markup, and no control sequence in them reaches a terminal:
whatever is printed passes `plain`, or is JSON in which control characters are escaped.

What is not written to a terminal is printed here, and cuts nothing; what is, by `muster.cli.terminal`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from datetime import UTC, datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self, TextIO, cast

import msgspec
import typer

from muster.cli import parsing
from serve_common.api.views import ReplicaView
from serve_common.clock import Clock, SystemClock
from serve_common.config.backend import METHODS, BackendConfig, RayActorOptions, ReplicaConfig
from serve_common.config.rollout import RolloutConfig
from serve_common.names import short_name
from serve_common.values import truncate

if TYPE_CHECKING:
    from rich.status import Status

_BRIEF_MAX = 160
_TRACEBACK_BEGINS = "Traceback (most recent call last):"


_CONTROL_CHARACTERS: Final = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""Control characters of terminals: those that move the cursor, colour, set titles or reverse text, C1 included; also
surrogates, which cannot be encoded. Line breaks and tabs are not among them."""


def plain(text: str) -> str:
    """``text`` as it may be printed: control characters are replaced by �."""
    return _CONTROL_CHARACTERS.sub("�", text.replace("\r\n", "\n"))


def print_json(value: Any) -> None:
    """Print one JSON document, indented, on standard output."""
    typer.echo(_escaped(json.dumps(msgspec.to_builtins(value), indent=2, ensure_ascii=False)))


def print_json_line(document: str) -> None:
    """Print an already encoded JSON document as one line on standard output."""
    typer.echo(_escaped(document))


def _escaped(document: str) -> str:
    """The same JSON with control characters escaped."""
    return _CONTROL_CHARACTERS.sub(lambda found: f"\\u{ord(found[0]):04x}", document)


def print_line(text: str) -> None:
    """Print a line of the result on standard output."""
    typer.echo(plain(text))


def print_error(text: str) -> None:
    """Print a line on standard error."""
    typer.echo(plain(text), err=True)


def _stderr_for_logs() -> TextIO:
    """Standard error that ignores failed writes: a full disk must not end a process that logs."""
    # It implements the part of a file that is used.
    return cast("TextIO", _Stderr())


class _Stderr:
    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            sys.stderr.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            sys.stderr.flush()


def write_body(body: bytes) -> None:
    """Write a response to standard output: unchanged, but on a terminal through `plain`."""
    if sys.stdout.isatty():
        print_line(body.decode(errors="replace").removesuffix("\n"))
    else:
        sys.stdout.buffer.write(body)
        sys.stdout.flush()


def configure_logs() -> None:
    """Print warnings of libraries and of Muster's own parts on standard error, through `plain`; may be called again.

    For commands that import what logs: importing structlog takes longer than `muster status` may.
    """
    import structlog  # noqa: PLC0415 - as above

    if not structlog.is_configured():
        structlog.configure(
            processors=[_plain_event, *structlog.get_config()["processors"]],
            wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
            logger_factory=structlog.PrintLoggerFactory(file=_stderr_for_logs()),
        )


class PlainFormatter(logging.Formatter):
    """Formats log lines of libraries, which may quote remote text, through `plain`."""

    def format(self, record: logging.LogRecord) -> str:
        """Format the record and replace control characters."""
        return plain(super().format(record))


def _plain_event(_logger: object, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """A structlog processor that replaces control characters in all fields."""
    return {name: plain(value if isinstance(value, str) else repr(value)) for name, value in event.items()}


def shorten(text: str) -> str:
    """Shorten a text to one line; a traceback becomes its exception, which is its last line."""
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    if not lines:
        return ""
    first = lines[0].replace(_TRACEBACK_BEGINS, "").strip()
    shown = first if len(lines) == 1 else f"{first} … {lines[-1]}".removeprefix(" … ")
    return truncate(shown, _BRIEF_MAX)


_REPEAT_S: Final = 5.0
"""Seconds after which a line of progress is repeated, so that a slow change does not look like one that hangs."""


class Progress:
    """Shows what a command waits for: a live line on a terminal; else a line when it changes, and every 5 seconds."""

    def __init__(self, title: str, clock: Clock | None = None) -> None:
        """``title`` is the prefix of every text; ``clock`` is given by tests."""
        self._title = title
        self._clock = clock or SystemClock()
        self._started_at = self._clock.now()
        self._printed_at = self._started_at
        self._status: Status | None = None
        self._last = ""

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            # Only here: most commands print into a pipe, or end before there is anything to wait for.
            from rich.text import Text  # noqa: PLC0415 - as above

            from muster.cli.terminal import get_console  # noqa: PLC0415 - as above

            self._status = get_console(stderr=True).status(Text(self._title))
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
        """End the live line, before results are shown; later texts are printed as lines."""
        if self._status is not None:
            self._status.stop()
            self._status = None

    def show(self, text: str) -> None:
        """Show what the command waits for now; may be called with the same text again."""
        text = shorten(text)
        if not text:
            return
        if self._status is not None:
            from rich.text import Text  # noqa: PLC0415 - as above

            self._status.update(Text(f"{self._title}: {text}"))
            return
        now = self._clock.now()
        if text != self._last:
            print_error(f"{self._title}: {text}")
        elif now - self._printed_at >= _REPEAT_S:
            print_error(f"{self._title}: {text} ({now - self._started_at:.0f} s)")
        else:
            return
        self._last, self._printed_at = text, now


_STYLES = {
    **dict.fromkeys(("healthy", "live", "running", "succeeded", "start"), "green"),
    **dict.fromkeys(("updating", "starting", "should_start", "suspect", "leaving", "pending"), "yellow"),
    **dict.fromkeys(("draining", "deleting", "reconfigure", "superseded"), "yellow"),
    **dict.fromkeys(("unhealthy", "lost", "failed", "stop"), "red"),
}
_RUNNING = frozenset({"running", "updating"})


class Cell(NamedTuple):
    """A text with its colour on a terminal."""

    text: str
    style: str = ""


class Table:
    """Rows of cells under the names of their columns."""

    def __init__(self, columns: Sequence[str]) -> None:
        """No columns: there is no head."""
        self.columns = columns
        self.rows: list[tuple[Cell, ...]] = []

    def add_row(self, *cells: Cell) -> None:
        """Add a row with a cell for each column."""
        self.rows.append(cells)


def table(*columns: str) -> Table:
    """An empty table."""
    return Table(columns)


def style_state(value: str) -> Cell:
    """The name of a state in its colour."""
    return Cell(value, _STYLES.get(value, ""))


def print_table(title: str, rows: Table) -> None:
    """Print a table under its title, or ``title: none`` when it has no rows."""
    if rows.rows:
        _print_rows(title, rows)
    else:
        print_line(f"{title}: none")


def _print_rows(title: str, rows: Table) -> None:
    if sys.stdout.isatty():
        from muster.cli import terminal  # noqa: PLC0415 - few commands write to one, and it is slow to import

        terminal.print_table(title, rows)
        return
    lines = [[" ".join(cell.text.split()) for cell in row] for row in rows.rows]
    if rows.columns:
        lines.insert(0, list(rows.columns))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    shown = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
    if rows.columns:
        shown.insert(1, "─" * (sum(widths) + 2 * len(widths) - 2))
    print_line("\n".join([title, *shown, ""] if title else shown))


def print_cells(*cells: Cell) -> None:
    """Print one line of cells."""
    if sys.stdout.isatty():
        from muster.cli import terminal  # noqa: PLC0415 - as above

        terminal.print_cells(cells)
    else:
        print_line(" ".join(cell.text for cell in cells))


def print_facts(facts: Mapping[str, str]) -> None:
    """Print names and values in two columns; empty values are left out."""
    rows = table()
    for title, value in facts.items():
        if value:
            rows.add_row(Cell(title, "bold"), style_state(value))
    _print_rows("", rows)


def print_replicas(replicas: Sequence[ReplicaView]) -> None:
    """Print a table with one row per replica."""
    rows = table("replica", "state", "host", "version", "message")
    for replica in replicas:
        rows.add_row(
            Cell(short_name(replica.replica_tag)),
            style_state(replica.state),
            Cell(replica.host_id or "-"),
            Cell(replica.version or "-"),
            Cell(shorten(replica.message)),
        )
    print_table("Replicas", rows)


def counts(replicas: Sequence[ReplicaView], config: BackendConfig) -> str:
    """Running replicas out of the configured number, such as ``2/3``."""
    return f"{sum(replica.state in _RUNNING for replica in replicas)}/{config.num_replicas}"


def get_config_facts(backend_config: BackendConfig, replica_config: ReplicaConfig) -> dict[str, str]:
    """The fields of both configurations as text, by field name."""
    return {**get_facts(replica_config), **get_facts(backend_config)}


def get_facts(fields: msgspec.Struct) -> dict[str, str]:
    """The non-empty fields as text, by field name."""
    named = msgspec.structs.asdict(fields)
    return {name: format_value(value) for name, value in named.items() if value not in ("", [], {}, None)}


_SECRET_NAME: Final = re.compile(
    r"pass|pwd|secret|token|key|cred|auth|private|dsn|cookie|session", re.IGNORECASE
)
_SECRET_URL: Final = re.compile(r"://[^/\s:@]*:[^/\s@]+@")
MASKED: Final = "********"


def mask_variable(name: str, value: Any) -> Any:
    """The value of an environment variable, unless it looks like a secret."""
    return MASKED if _SECRET_NAME.search(name) or _SECRET_URL.search(str(value)) else value


def mask_secrets(code: ReplicaConfig) -> ReplicaConfig:
    """``code`` without values of environment variables that look like secrets, by their names or as URLs."""
    options = code.ray_actor_options
    variables = options.runtime_env.get("env_vars")
    if not isinstance(variables, dict):
        return code
    runtime_env = mask_config(options.runtime_env)
    return msgspec.structs.replace(
        code, ray_actor_options=msgspec.structs.replace(options, runtime_env=runtime_env)
    )


def mask_config(value: Any) -> Any:
    """A configuration without such values of environment variables, wherever it has ``env_vars``."""
    if isinstance(value, list):
        return [mask_config(each) for each in value]
    if not isinstance(value, dict):
        return value
    masked = {name: mask_config(inner) for name, inner in value.items()}
    if isinstance(variables := value.get("env_vars"), dict):
        masked["env_vars"] = {name: mask_variable(name, text) for name, text in variables.items()}
    return masked


def format_methods(methods: Sequence[str]) -> str:
    """HTTP methods as a list; ``all`` when none is missing."""
    return "all" if set(methods) == set(METHODS) else ", ".join(methods)


def format_value(value: Any) -> str:
    """Format a value: text unchanged, a group of fields as its option takes it, anything else as JSON."""
    if isinstance(value, msgspec.Struct) and not isinstance(value, RayActorOptions | RolloutConfig):
        return parsing.group_text(value)
    plain = msgspec.to_builtins(value)
    return plain if isinstance(plain, str) else msgspec.json.encode(plain).decode()


def format_time(at: float | None) -> str:
    """Format seconds since 1970 as date and time in UTC; ``-`` for None."""
    return "-" if at is None else datetime.fromtimestamp(at, tz=UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def format_shares(amounts: Mapping[str, float]) -> str:
    """Format weights or proportions as ``name=share``, sorted by name; ``-`` for none."""
    return ", ".join(f"{short_name(name)}={amount:g}" for name, amount in sorted(amounts.items())) or "-"
