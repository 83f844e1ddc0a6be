"""Finding the way by `--help` alone, and how quickly it comes."""

from __future__ import annotations

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
WITHOUT_STACK = {"up", "secrets", "plan"}


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
    summary = COMMANDS[words].help.splitlines()[0]
    assert summary.endswith(".")
    assert len(summary) < 80
    for line in COMMANDS[words].help.splitlines():
        assert len(line) <= 76, f"would be broken on a terminal of 80 columns: {line}"


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
            assert (group.help or "").endswith(f": {', '.join(group.commands)}."), name


def test_help_imports_nothing_heavy() -> None:
    heavy = {"ray", "numpy", "nats", "aiohttp", "sklearn", "asyncpg", "uvloop", "cloudpickle", "starlette"}
    code = f"import sys, muster.cli.main; print(sorted({heavy} & sys.modules.keys()))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=True
    )
    assert done.stdout.strip() == "[]"
