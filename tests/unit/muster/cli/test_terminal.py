"""Nothing that comes from outside is obeyed by a terminal: it is shown as text, and as JSON it stays what it was."""

from __future__ import annotations

import io
import json
import logging
import re
import sys
import unicodedata
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from rich.text import Text
from typer.testing import Result

from muster.cli import output, terminal
from muster.cli.logs import show_line
from serve_common.api.views import EventView, GoalStatus, GoalView
from serve_common.errors import BadField
from serve_common.names import GoalId
from tests.unit.muster.cli.conftest import DEPLOYMENT, PROXY, STATUS, PlayedController

Run = Callable[..., Result]

HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31m\x90q\x9c\r\x08\u202e\u2066gone\tkept\nnext\x00\x7f\x85"
TRACEBACK = f'Traceback (most recent call last):\n  File "x.py"\nValueError: {HOSTILE}'


def is_obeyed(character: str) -> bool:
    return character not in "\n\t" and (
        unicodedata.category(character) in ("Cc", "Cs") or character in "\u202e\u2066"
    )


def check(text: str) -> None:
    assert not any(map(is_obeyed, text)), ascii(text)
    assert "gone" in text


def hostile(view: Any) -> Any:
    """``view`` with every text of its own as bad as it may be."""
    return msgspec.structs.replace(
        view,
        **{
            name: HOSTILE + value
            for name, value in msgspec.structs.asdict(view).items()
            if type(value) is str and name not in ("name", "method")
        },
    )


ROWS = [EventView(at=1.0, kind="replica", subject=HOSTILE, state="failed", message=TRACEBACK)]


@pytest.fixture
def played(controller: PlayedController) -> PlayedController:
    replicas = [hostile(replica) for replica in DEPLOYMENT.replicas]
    deployment = msgspec.structs.replace(hostile(DEPLOYMENT), replicas=replicas, message=TRACEBACK)
    controller.answers |= {
        "get_status": msgspec.structs.replace(
            STATUS, controller_id=HOSTILE, deployments=[deployment], hosts=[], proxies=[hostile(PROXY)]
        ),
        "get_deployment_info": deployment,
        "wait_for_goal": GoalView(goal_id=GoalId("goal-1"), status=GoalStatus.FAILED, error=TRACEBACK),
        "get_events": ROWS,
    }
    return controller


@pytest.mark.parametrize(
    "command",
    [
        "status --format table", "info digits", "events", "proxy list",
        "deploy digits:Digits --name digits", "delete digits", "goal wait goal-1",
    ],
)  # fmt: skip
def test_what_commands_print_of_others_moves_no_cursor(
    played: PlayedController, muster: Run, command: str
) -> None:
    played.answers["get_http_proxies"] = [hostile(PROXY)]
    told = muster(*command.split())
    check(told.output)
    as_json = muster(*command.split(), "--json")
    check(as_json.stdout)
    decoder = json.JSONDecoder()
    document, _ = decoder.raw_decode(as_json.stdout)
    assert HOSTILE in str(list(_texts(document))) or any(HOSTILE in text for text in _texts(document))


def _texts(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [text for each in value.values() for text in _texts(each)]
    if isinstance(value, list):
        return [text for each in value for text in _texts(each)]
    return [value] if isinstance(value, str) else []


def test_an_error_that_quotes_user_code_moves_no_cursor(played: PlayedController, muster: Run) -> None:
    played.answers["deploy"] = BadField("replica_config", TRACEBACK)
    told = muster("deploy", "digits:Digits", "--name", "digits")
    assert told.exit_code == 2
    check(told.output)


def test_log_lines_tables_and_progress_are_for_people_and_not_for_terminals(
    capsys: pytest.CaptureFixture[str],
) -> None:
    show_line(
        terminal.get_console(),
        {"event": "log", "logger": HOSTILE, "message": HOSTILE, "exception": TRACEBACK},
    )
    show_line(
        terminal.get_console(), {"event": HOSTILE, "replica_tag": HOSTILE, HOSTILE: HOSTILE, "level": HOSTILE}
    )
    check(capsys.readouterr().out)
    with output.Progress(HOSTILE) as progress:
        progress.show(TRACEBACK)
    check(capsys.readouterr().err)


def test_colours_of_our_own_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    console = terminal.get_console()
    console.file = io.StringIO()
    console.print(Text("\x1b[31mred", style="bold"))
    assert console.file.getvalue() == "\x1b[1m�[31mred\x1b[0m\n"


@pytest.mark.parametrize("is_terminal", [True, False])
def test_an_answer_is_exact_unless_it_is_for_a_terminal(
    monkeypatch: pytest.MonkeyPatch, is_terminal: bool
) -> None:
    written = io.BytesIO()
    stream = io.TextIOWrapper(written, encoding="utf-8", write_through=True)
    monkeypatch.setattr(stream, "isatty", lambda: is_terminal, raising=False)
    monkeypatch.setattr(sys, "stdout", stream)
    body = HOSTILE.encode() + b"\xff\n"
    output.write_body(body)
    if is_terminal:
        check(written.getvalue().decode())
    else:
        assert written.getvalue() == body


def test_lines_of_libraries_are_plain_too() -> None:
    record = logging.LogRecord("nats", logging.ERROR, "x", 1, "said %s", (HOSTILE,), None)
    check(output.PlainFormatter().format(record))
    told = output._plain_event(None, "warning", {"event": HOSTILE, "error": ValueError(HOSTILE)})
    check("".join(map(str, told.values())))


def test_line_breaks_tabs_and_letters_of_all_languages_stay() -> None:
    text = "日本語 grüß\tא ب 🙂\r\nnext\n"
    assert output.plain(text) == text.replace("\r\n", "\n")
    assert output.plain("\ud800") == "�"


def test_what_is_piped_is_not_cut(capsys: pytest.CaptureFixture[str]) -> None:
    rows = output.table("name", "message")
    rows.add_row(output.Cell("digits"), output.Cell("word " * 100 + "end\nnext", "red"))
    output.print_table("Deployments", rows)
    title, head, rule, row, *rest = capsys.readouterr().out.splitlines()
    assert (title, head, rest) == ("Deployments", "name    message", [""])
    assert set(rule) == {"─"}
    assert row == f"digits  {'word ' * 100}end next"


def test_a_terminal_gets_tables_that_fit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "40")
    rows = output.table("name", "message")
    rows.add_row(output.Cell("digits"), output.Cell("word " * 20, "red"))
    output.print_table("Deployments", rows)
    shown = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
    assert shown.count("word") == 20
    assert max(map(len, shown.splitlines())) <= 40, shown


class MovedClock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.at = 100.0

    def now(self) -> float:
        return self.at


def test_a_slow_change_is_told_of_every_few_seconds_off_a_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock = MovedClock()
    with output.Progress("digits", clock) as progress:
        for at, text in (
            (1, "0 of 1 run"),
            (2, "0 of 1 run"),
            (6.5, "0 of 1 run"),
            (7, "1 of 1 run"),
            (9, ""),
        ):
            clock.at = 100.0 + at
            progress.show(text)
    assert capsys.readouterr().err.splitlines() == [
        "digits: 0 of 1 run",
        "digits: 0 of 1 run (6 s)",
        "digits: 1 of 1 run",
    ]
