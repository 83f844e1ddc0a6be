"""The page's tables of commands and of fields of files, against the installed package of Ray Serve, which is read."""

from __future__ import annotations

import ast
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import typer

from muster.cli.main import app
from muster.cli.serve_config import check_config
from muster.cli.yaml_file import YamlFile
from serve_common.errors import BadField
from tests.support.paths import ROOT

RAY_SERVE = Path(str(importlib.util.find_spec("ray").origin)).parent / "serve"  # type: ignore[union-attr]
COMMANDS: Any = typer.main.get_command(app)


def table(heading: str) -> dict[str, tuple[str, str]]:
    """The rows of the page's table under ``heading``: state and remark by name."""
    text = (ROOT / "docs/coming-from-ray-serve.md").read_text()
    part = text.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    rows = [
        [cell.strip() for cell in line.split("|")] for line in part.splitlines() if line.startswith("| `")
    ]
    return {row[1].strip("`"): (row[2], row[3]) for row in rows}


def ray_commands() -> dict[str, list[tuple[str, ...]]]:
    """Ray Serve's commands by name, each with the spellings of its options."""
    found: dict[str, list[tuple[str, ...]]] = {}
    for node in ast.parse((RAY_SERVE / "scripts.py").read_text()).body:
        calls = [each for each in getattr(node, "decorator_list", ()) if isinstance(each, ast.Call)]
        kinds = {ast.unparse(each.func): each for each in calls}
        if not isinstance(node, ast.FunctionDef) or "cli.command" not in kinds:
            continue
        named = [each.value for each in kinds["cli.command"].keywords if each.arg == "name"]
        name = ast.literal_eval(named[0]) if named else node.name
        found[name] = [
            tuple(str(ast.literal_eval(word)) for word in each.args)
            for each in calls
            if ast.unparse(each.func) == "click.option"
        ]
    return found


def test_the_page_says_of_every_command_and_option_whether_it_is_there() -> None:
    stated, theirs = table("Commands"), ray_commands()
    assert len(theirs) == 8
    assert {name for name in stated if " " not in name} == set(theirs)
    compared = 0
    for name, options in theirs.items():
        state = stated[name][0]
        assert state in ("works", "differs", "not there")
        assert (name in COMMANDS.commands) == (state != "not there"), name
        if state == "not there":
            continue
        ours = {
            spelled
            for each in COMMANDS.commands[name].params
            for spelled in (*each.opts, *each.secondary_opts)
        }
        for spellings in options:
            wanted = {part for spelled in spellings for part in spelled.split("/")}
            is_left_out = f"{name} {spellings[0].partition('/')[0]}" in stated
            assert is_left_out != (wanted <= ours), f"{name} {spellings}"
            compared += 1
    assert compared > 25


def fields(name: str) -> set[str]:
    """The fields of a class of ``ray.serve.schema``."""
    [node] = [
        node
        for node in ast.parse((RAY_SERVE / "schema.py").read_text()).body
        if isinstance(node, ast.ClassDef) and node.name == name
    ]
    return {
        each.target.id
        for each in node.body
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }


VALUES: dict[str, Any] = {
    "proxy_location": "HeadOnly",
    "target_capacity": 50.0,
    "applications.host": "127.0.0.1",
    "applications.port": 8001,
}


def config(field: str) -> Any:
    """A file with one application that sets a field."""
    content: dict[str, Any] = {"applications": [{"import_path": "a:b"}]}
    place, _, name = field.rpartition(".")
    (content["applications"][0] if place else content)[name] = VALUES.get(field, {})
    return check_config(YamlFile(json.dumps(content), "f.yaml"), ROOT)


def test_the_page_says_of_every_field_of_a_file_whether_it_works() -> None:
    stated = table("Configuration files")
    assert set(stated) == fields("ServeDeploySchema") | {
        f"applications.{name}" for name in fields("ServeApplicationSchema")
    }
    for field, (state, remark) in stated.items():
        assert state in ("works", "differs", "not there")
        if state == "not there":
            with pytest.raises(BadField, match=field.rpartition(".")[2]):
                config(field)
        elif remark.startswith("no effect"):
            assert config(field).ignored == [field]
