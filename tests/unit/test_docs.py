"""What the documentation names exists: links, commands, options, variables, metrics, error codes. Its code works."""

from __future__ import annotations

import ast
import json
import re
from typing import Any

import msgspec
import pytest
import typer
import yaml

from muster.cli.main import app as cli
from serve_common.api.commands import DeployApplication
from serve_common.telemetry.catalogue import get_spec
from tests.support.documents import ROOT, Block, Page, all_pages, page
from tests.support.reader import (
    BY_TESTS_OF_THEIR_OWN,
    IN_CONTAINERS,
    NOT_EXECUTED,
    ON_AN_EMBEDDED_STACK,
    WITH_COMMANDS_IN_SENTENCES,
)

PAGES = all_pages()
EACH = pytest.mark.parametrize("each", [pytest.param(each, id=each.name) for each in PAGES])
COMMANDS: Any = typer.main.get_command(cli)
NEEDS_A_STACK = {"call_stock.py", "scores/clients.py"}
VARIABLES = page("docs/reference/variables.md").text
A_COMMAND = r"(?:\$ )?(?:curl|docker|make|muster|nats|pip|python) "
GENERATED = ROOT / "docs/reference"
LANGUAGES = {"", "json", "promql", "python", "sh", "text", "yaml"}
NOT_METRICS = {
    "serve_common",
    "serve_controller",
    "serve_proxy",
    "serve_replica_host",
    "serve_multiplexed_model_id",
}


@EACH
def test_every_link_leads_somewhere(each: Page) -> None:
    for link in each.links():
        target, _, anchor = link.partition("#")
        path = (each.path.parent / target).resolve() if target else each.path
        assert path.exists(), f"{link} does not exist"
        if anchor:
            assert anchor in Page(path, path.read_text()).anchors(), f"{link} has no such heading"


def muster_words(words: list[str]) -> list[str] | None:
    """What follows ``muster`` in a command; None for another program's."""
    return words[1:] if words and words[0] in {"muster", ".venv/bin/muster"} else None


def parse(words: list[str]) -> None:
    """Parse a whole command as the command line does, without running it. Raises click's errors."""
    command: Any = COMMANDS
    context: Any = None
    while hasattr(command, "commands"):
        context = command.make_context(command.name, words, parent=context, resilient_parsing=True)
        name, command, words = command.resolve_command(context, [*context._protected_args, *context.args])
        if name == "plan":
            return parse(words)
    command.make_context(command.name, words, parent=context)
    return None


@EACH
def test_every_command_can_be_parsed(each: Page) -> None:
    for block in each.blocks("sh"):
        for command in block.commands():
            given = muster_words(command.words)
            if given is not None:
                parse(given)


def check_names(words: list[str]) -> None:
    """Commands and options exist; what they are given may be a placeholder."""
    command: Any = COMMANDS
    group: Any = command
    for word in words:
        if word.startswith("-"):
            options = {option for each in command.params for option in (*each.opts, *each.secondary_opts)}
            assert word.partition("=")[0] in options | {"--help"}, f"{command.name} has no {word}"
        elif command is group and hasattr(group, "commands"):
            if word.isupper():
                return
            assert word in group.commands, f"there is no command {word}"
            command = group.commands[word]
            group = command if hasattr(command, "commands") or word == "plan" else group
            if word == "plan":
                command = group = COMMANDS


def pages_with_commands() -> dict[str, list[Block]]:
    """Those that must be followed, with the blocks whose commands must be executed."""
    found = {each.name: each.blocks("sh") for each in PAGES if each.blocks("sh")}
    for name in WITH_COMMANDS_IN_SENTENCES:
        found.setdefault(name, []).append(page(name).inline_commands())
    return found


def test_every_page_with_commands_is_followed_by_one_test() -> None:
    followed = sorted([*ON_AN_EMBEDDED_STACK, *IN_CONTAINERS, *BY_TESTS_OF_THEIR_OWN])
    assert sorted(pages_with_commands()) == followed


@EACH
def test_commands_are_where_they_are_followed(each: Page) -> None:
    """And not in a block of another language, or in one without a fence."""
    assert {block.language for block in each.blocks()} <= LANGUAGES
    assert not re.search(rf"^ {{4,}}{A_COMMAND}", each.prose, re.MULTILINE)
    if each.path.parent != GENERATED:  # what is there comes from the code, whose tests know it
        for block in each.blocks("", "text"):
            assert not re.search(rf"^{A_COMMAND}", block.text, re.MULTILINE)


def test_what_is_not_executed_is_on_its_page_and_has_a_reason() -> None:
    for name, left_out in NOT_EXECUTED.items():
        commands = {str(command) for block in pages_with_commands()[name] for command in block.commands()}
        assert left_out.keys() - commands == set(), name
        assert all(left_out.values()), name


@EACH
def test_every_command_in_a_sentence_exists(each: Page) -> None:
    for code in each.inline_code():
        if code.startswith("muster ") and "<" not in code and "`" not in code:
            check_names(code.replace("'", "").split()[1:])


@EACH
def test_every_target_of_make_exists(each: Page) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    commands = [command.words for block in each.blocks("sh") for command in block.commands()]
    commands += [code.split() for code in each.inline_code()]
    named = {words[1] for words in commands if words[0] == "make" and len(words) > 1}
    assert {name for name in named if re.fullmatch(r"[a-z-]+", name)} <= targets


@EACH
def test_every_service_of_compose_exists(each: Page) -> None:
    services = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    text = " ".join(each.text.split())
    for name in re.findall(r"docker compose (?:restart|exec|up -d|ps|logs --since \w+) ([a-z][a-z-]+)", text):
        assert name in services, name


@EACH
def test_every_variable_is_in_the_reference(each: Page) -> None:
    for name, wildcard in set(re.findall(r"\b(MUSTER_[A-Z0-9_]*)([<{…]?)", each.text)):
        assert re.search(rf"\b{name}" if wildcard else rf"\b{name}\b", VARIABLES), name


@EACH
def test_every_metric_is_exported(each: Page) -> None:
    for code in each.inline_code():
        if re.fullmatch(r"serve_[a-z]+_[a-z_]+", code) and code not in NOT_METRICS:
            assert get_spec(code) is not None, code


@EACH
def test_python_blocks_compile_and_those_that_need_no_stack_run(
    each: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    for block in each.blocks("python"):
        compile(block.text, each.name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT | ast.PyCF_ONLY_AST)
        try:
            code = compile(block.text, each.name, "exec")
        except SyntaxError:
            continue  # it awaits at the top, as in a notebook
        if block.file_name not in NEEDS_A_STACK:
            exec(code, {"__name__": f"docs.{each.path.stem}"})


@EACH
def test_data_blocks_can_be_read(each: Page) -> None:
    for block in each.blocks("json"):
        json.loads(block.text)
    for block in each.blocks("yaml"):
        found = yaml.safe_load(block.text)
        if "deployments" in found:
            msgspec.convert(found, DeployApplication)


def test_every_decision_is_in_the_list() -> None:
    folder = ROOT / "docs/decisions"
    assert sorted(page("docs/decisions/README.md").links()) == sorted(
        path.name for path in folder.glob("0*.md")
    )


def test_every_page_is_in_the_index() -> None:
    linked = {(ROOT / "docs" / link.partition("#")[0]).resolve() for link in page("docs/README.md").links()}
    pages = {path for path in (ROOT / "docs").rglob("*.md") if path.parent.name != "decisions"}
    assert pages - linked == {ROOT / "docs/README.md"}
