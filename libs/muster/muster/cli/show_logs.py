"""A log line as a person reads it on a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec
from rich.console import Console
from rich.text import Text

from muster.cli import output

_STYLES: Final = {"debug": "dim", "warning": "yellow", "error": "red", "critical": "bold red"}
_SHOWN: Final = frozenset(
    (
        *("timestamp", "level", "event", "logger", "message", "exception", "stack", "traceback", "source"),
        *("service", "replica_tag", "backend_tag", "proxy_id", "host_id", "controller_id"),
    )
)
_OF_USERS: Final = ("log", "print")


def show_line(console: Console, line: Mapping[str, Any]) -> None:
    """When, how grave, who, what; then the rest of its fields, and a traceback below."""
    level = str(line.get("level", ""))
    style = _STYLES.get(level, "")
    text = Text()
    text.append(f"{_time_of(line):<12} ", style="dim")
    text.append(f"{level.upper():<8} ", style=style)
    text.append(f"{who(line)} ", style="cyan")
    is_users = line.get("event") in _OF_USERS
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


def who(line: Mapping[str, Any]) -> str:
    """Which process said it."""
    if line.get("replica_tag"):
        return output.short_name(str(line["replica_tag"]))
    for name in ("proxy_id", "host_id", "controller_id"):
        if line.get(name):
            return str(line[name])
    return str(line.get("service", "?"))


def _time_of(line: Mapping[str, Any]) -> str:
    _, _, clock = str(line.get("timestamp", "")).partition("T")
    return clock[:12].rstrip("Z") or "-"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.rstrip().splitlines())
