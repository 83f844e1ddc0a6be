"""What `muster up` tells: how the stack starts, what runs where, and what happens to it afterwards."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import msgspec

from muster.cli import output
from muster.embedded.process import Happened, ProcessEvent
from muster.embedded.run_record import RunRecord


class UpReport:
    """Lines for people, or with ``as_json`` one JSON object a line, each with its ``event``."""

    def __init__(self, *, directory: Path, as_json: bool) -> None:
        """Paths are shown as seen from ``directory``."""
        self._directory = directory
        self._as_json = as_json
        self._is_ready = False

    def hear_event(self, event: ProcessEvent) -> None:
        """Something happened to a process."""
        if self._as_json:
            self._emit(event.happened.value, **{k: v for k, v in _plain(event).items() if k != "happened"})
            return
        match event.happened:
            case Happened.READY if event.restarts:
                self.tell(f"{event.name} is back (pid {event.pid}, start {event.restarts + 1})")
            case Happened.READY:
                self.tell(f"  {event.name:<14}is ready")
            case Happened.DIED:
                self.tell(f"{event.name} died: {event.detail}")
            case Happened.STARTED | Happened.STOPPED:
                return  # known from what was asked for

    def hear_notice(self, text: str) -> None:
        """A sentence for the user."""
        if self._as_json:
            self._emit("notice", text=text)
        else:
            self.tell(f"  {text}")

    def starting(self) -> None:
        """It begins."""
        if not self._as_json:
            self.tell("starting the stack: NATS, Postgres, controller, replica host, proxy")

    def ready(self, record: RunRecord, seconds: float) -> None:
        """Everything is ready: what runs where."""
        if self._as_json:
            self._emit("stack_ready", seconds=round(seconds, 3), stack=_plain(record))
            return
        rows = {
            "HTTP": record.http_url,
            "NATS": f"{record.nats_url}  (nats --creds {self._seen(record.secrets)}/admin.creds)",
            "NATS monitor": record.nats_monitor_url,
            "Postgres": record.postgres_dsn,
            **{f"{name} metrics": f"{url}/metrics" for name, url in record.ops_urls.items()},
            "state": self._seen(record.state_dir),
            "logs": f"{self._seen(record.state_dir)}/logs",
        }
        width = max(map(len, rows)) + 2
        lines = [f"ready after {seconds:.1f} s", "", *(f"  {k:<{width}}{v}" for k, v in rows.items()), ""]
        self.tell("\n".join(lines))

    def example(self, lines: list[str], *, is_serving: bool) -> None:
        """How the example's deploy went."""
        if self._as_json:
            self._emit("example", is_serving=is_serving, text="\n".join(lines))
        else:
            self.tell("\n".join(lines))

    def staying(self) -> None:
        """From here on it only runs."""
        if not self._as_json:
            self.tell("Ctrl-C stops it.")

    def stopping(self) -> None:
        """A stop was asked for."""
        if self._as_json:
            self._emit("stopping")
        else:
            self.tell("\nstopping; once more kills at once")

    def stopped(self, seconds: float) -> None:
        """Nothing runs any more."""
        if self._as_json:
            self._emit("stopped", seconds=round(seconds, 3))
        else:
            self.tell(f"stopped after {seconds:.1f} s; the state is kept")

    def tell(self, text: str) -> None:
        """One text on standard output."""
        # A closed terminal or pipe, where nobody reads any more, must not end a stack that serves.
        with contextlib.suppress(OSError):
            output.say(text)

    def _emit(self, event: str, **facts: Any) -> None:
        with contextlib.suppress(OSError):
            output.print_json_line(json.dumps({"event": event, **facts}, ensure_ascii=False))

    def _seen(self, path: str) -> str:
        return seen_from(self._directory, path)


def seen_from(directory: Path, path: str | Path) -> str:
    """The path to type in ``directory``: relative below it, absolute elsewhere."""
    relative = os.path.relpath(path, directory)
    return str(path) if relative.startswith("..") else relative


def _plain(value: Any) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.to_builtins(value)
    return plain
