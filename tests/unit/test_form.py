"""The form of the code: no import cycles, one class of a name, files that are chapters."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from graphlib import CycleError, TopologicalSorter

import pytest

from tests.stats import LINES_MAX, PRODUCT, SourceFile, source_files


@pytest.fixture(scope="module")
def files() -> list[SourceFile]:
    return list(source_files(*PRODUCT))


def imported_at_once(file: SourceFile, modules: set[str]) -> set[str]:
    """What importing ``file`` imports of the product before its own first line runs."""
    found = set[str]()
    for node in file.tree.body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= names & modules or {node.module}
    return found & modules - {file.module}


def test_no_modules_import_each_other_in_a_cycle(files: list[SourceFile]) -> None:
    modules = {file.module for file in files}
    imports = {file.module: imported_at_once(file, modules) for file in files}
    assert sum(len(found) for found in imports.values()) > len(files)
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        pytest.fail(" → ".join(error.args[1]))


def test_no_public_class_has_the_name_of_another(files: list[SourceFile]) -> None:
    homes = defaultdict[str, list[str]](list)
    for file in files:
        for node in file.tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(file.module)
    assert len(homes) > 500
    assert {name: found for name, found in homes.items() if len(found) > 1} == {}


def test_no_file_is_longer_than_a_chapter(files: list[SourceFile]) -> None:
    long = {file.module: file.lines for file in files if file.lines > LINES_MAX}
    assert long == {}


def test_no_docstring_leaves_out_its_subject_or_speaks_of_people(files: list[SourceFile]) -> None:
    banned = re.compile(r"(Of|See) |.*\b(whoever|somebody)\b", re.DOTALL)
    found = [
        f"{file.module}:{node.lineno}: {node.value.value.strip()[:60]}"
        for file in files
        for node in ast.walk(file.tree)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        and banned.match(node.value.value.lstrip())
    ]
    assert found == []
