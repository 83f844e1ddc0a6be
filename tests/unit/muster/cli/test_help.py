"""Finding the way by `--help` alone, and how quickly it comes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import typer
from typer.core import TyperGroup
from typer.testing import Result

from muster.cli.main import app
from muster.cli.queries import STACK_OPTIONS

ROOT = typer.main.get_command(app)
WITHOUT_STACK = {"up", "secrets", "build", "plan", "help", "context", "init", "completion", "console"}


def leaves(command: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(command, TyperGroup):
        for name, each in command.commands.items():
            yield from leaves(each, (*words, name))
    else:
        yield words, command


COMMANDS = dict(leaves(ROOT))
EACH = pytest.mark.parametrize("words", [pytest.param(words, id=" ".join(words)) for words in COMMANDS])


@EACH
def test_every_command_explains_itself(muster: Callable[..., Result], words: tuple[str, ...]) -> None:
    result = muster(*words, "--help")
    assert result.exit_code == 0
    assert f"Usage: muster {' '.join(words)}" in result.stdout
    summary, _, _rest = COMMANDS[words].help.partition("\n\n")
    assert summary.endswith(".")
    assert len(summary) < 90
    for line in COMMANDS[words].help.splitlines():
        assert not line.startswith("  ") or len(line) <= 78, f"an example wider than a terminal: {line}"


@EACH
@pytest.mark.parametrize("columns", [60, 80, 120])
def test_no_name_or_value_is_cut_or_broken(words: tuple[str, ...], columns: int) -> None:
    context = typer.Context(COMMANDS[words], info_name=" ".join(words), terminal_width=columns)
    shown = COMMANDS[words].get_help(context)
    for line in shown.splitlines():
        is_example = line.startswith("  ") and columns < 80
        assert len(line) <= columns or is_example or len(line.split()) == 1, line
    assert "…" not in shown
    each_word = set(shown.replace(",", " ").split())
    for each in COMMANDS[words].params:
        assert each.help or each.name == "help"
        for name in (*each.opts, *each.secondary_opts):
            if name.startswith("-"):
                assert name in each_word, name


@EACH
def test_every_value_has_a_metavar_in_upper_case(words: tuple[str, ...]) -> None:
    for each in COMMANDS[words].params:
        if not getattr(each, "is_flag", False):
            assert each.metavar, each.name
            assert each.metavar == each.metavar.upper(), each.name


def test_usage_shows_what_must_and_what_may_be_given(muster: Callable[..., Result]) -> None:
    for line in (
        "muster deploy [OPTIONS] IMPORT_PATH|FILE [KEY=VALUE...]",
        "muster build [OPTIONS] IMPORT_PATH...",
        "muster traffic set [OPTIONS] ENDPOINT BACKEND=WEIGHT...",
        "muster logs [OPTIONS] [NAME]",
        "muster plan COMMAND [ARGS]...",
    ):
        words = line.partition(" [")[0].split()[1:]
        words = [word for word in words if word.islower()]
        assert f"Usage: {line}\n" in muster(*words, "--help").stdout


def test_help_of_a_command_is_what_the_command_shows(muster: Callable[..., Result]) -> None:
    assert muster("help", "traffic", "set").stdout == muster("traffic", "set", "--help").stdout
    assert muster("help", "traffic").stdout == muster("traffic", "--help").stdout
    assert muster("help").stdout == muster("--help").stdout
    unknown = muster("help", "sclae")
    assert unknown.exit_code == 2
    assert "Did you mean 'scale'" in unknown.stderr


def test_logs_takes_the_option_that_other_tools_follow_with() -> None:
    assert COMMANDS["logs",].make_context("logs", ["-f"]).params["follow"] is True


@pytest.mark.parametrize("word", ["down", "stop"])
def test_what_other_tools_call_stopping_is_answered_with_what_to_do(
    muster: Callable[..., Result], word: str
) -> None:
    result = muster(word)
    assert result.exit_code == 2
    assert "Ctrl-C" in result.stderr
    assert "docker compose down" in result.stderr


@EACH
def test_every_command_has_json_and_the_stack_options(words: tuple[str, ...]) -> None:
    options = {each.name for each in COMMANDS[words].params}
    if words[0] not in WITHOUT_STACK:
        assert {each.name for each in STACK_OPTIONS} <= options
    if "dry_run" in options:
        assert {"timeout_s", "no_wait"} <= options


def test_the_root_names_every_command_and_what_groups_hold(muster: Callable[..., Result]) -> None:
    shown = " ".join(muster("--help").stdout.replace("│", " ").split())
    for words in COMMANDS:
        for word in words:
            assert word in shown, words
    for name, group in ROOT.commands.items():  # type: ignore[attr-defined]
        if isinstance(group, TyperGroup):
            summary = " ".join((group.help or "").partition("\n\n")[0].split())
            assert summary.endswith(f": {', '.join(group.commands)}."), name


HEAVY = {
    *("aiohttp", "asyncpg", "attr", "cloudpickle", "email.message", "importlib.metadata", "nats", "numpy"),
    *("opentelemetry", "prometheus_client", "psutil", "pydantic", "pygments", "ray", "rich", "sklearn"),
    *("starlette", "structlog", "uvloop", "yaml", "zipfile"),
}
"""Modules that take long to import, and that no command needs which asks the controller and prints its answer."""
QUICK = {
    "status": "muster.cli.top muster.cli.up muster.cli.deployments muster.cli.config_options muster.embedded.stack",
    "scale digits 3": "muster.cli.up muster.cli.status muster.embedded.stack",
    "rollback digits": "muster.cli.up muster.cli.status muster.embedded.stack",
    "history": "muster.cli.up muster.cli.status muster.cli.changes muster.embedded.stack",
}
"""Commands, and which of Muster's own modules they do not need either."""
NOBODY = "nats://127.0.0.1:1"


@pytest.fixture(scope="module")
def quick_commands() -> Iterator[dict[str, subprocess.Popen[str]]]:
    """All at once: each tries for five seconds to reach a server that nobody answers at."""

    def start(words: str) -> subprocess.Popen[str]:
        code = (
            "import sys; from muster.cli import main\n"
            "try: main()\n"
            f"finally: print(*sorted(({HEAVY | {*QUICK[words].split()}}) & sys.modules.keys()), file=sys.stderr)"
        )
        return subprocess.Popen(
            [sys.executable, "-c", code, *words.split()],
            env={**os.environ, "MUSTER_NATS_URL": NOBODY},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    started = {words: start(words) for words in QUICK}
    yield started
    for process in started.values():
        process.kill()
        process.communicate()


@pytest.mark.parametrize("words", QUICK)
def test_a_command_imports_only_what_it_needs(
    words: str, quick_commands: dict[str, subprocess.Popen[str]]
) -> None:
    """With a server that nobody answers at, it comes as far as NATS."""
    _, stderr = quick_commands[words].communicate(timeout=50)
    *_, error, imported = stderr.splitlines()
    assert (quick_commands[words].returncode, imported) == (3, ""), stderr
    assert error.startswith(f"error: NATS at {NOBODY} does not answer"), stderr


def test_the_form_of_ray_serves_status_needs_no_pydantic() -> None:
    code = (
        "import sys, muster.cli, muster.cli.status, muster.sdk.states\n"
        f"print(*sorted({HEAVY} & sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=True
    )
    assert done.stdout == "\n"


def test_all_kinds_of_values_are_read_as_typer_reads_them(muster: Callable[..., Result]) -> None:
    for words, said in {
        ("scale", "digits", "x"): "valid integer",
        ("goal", "wait", "goal-1", "--timeout-s", "-1"): "greater than or equal to 0",
        ("up", "--http-port", "70000"): "less than or equal to 65535",
        ("up", "--http-port", "1.5"): "valid integer",
    }.items():
        result = muster(*words)
        assert result.exit_code == 2
        assert said in result.stderr, result.stderr
