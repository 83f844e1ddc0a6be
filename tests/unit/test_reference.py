"""The reference pages are what the code generates now, and leave out nothing."""

from __future__ import annotations

import ast
import json
import re

import msgspec
import pytest

from docs.generator.__main__ import DIRECTORY, pages
from docs.generator.admin import EXAMPLES, verbs
from docs.generator.variables import INTERNAL, SECTIONS, record
from tests.stats import PRODUCT, ROOT, source_files


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    return dict(pages())


def test_the_pages_are_what_the_code_says(texts: dict[str, str]) -> None:
    def is_current(name: str) -> bool:
        path = DIRECTORY / name
        return path.is_file() and path.read_text(encoding="utf-8") == texts[name]

    stale = [name for name in texts if not is_current(name)]
    assert not stale, f"run make docs: {', '.join(stale)}"


def test_no_page_has_a_row_without_a_meaning(texts: dict[str, str]) -> None:
    rows = [f"{name}: {line}" for name, text in texts.items() for line in text.splitlines()]
    assert [row for row in rows if row.endswith("|  |")] == []


def test_every_verb_has_an_example_that_is_accepted() -> None:
    assert EXAMPLES.keys() == {verb.name for verb in verbs()}
    for verb in verbs():
        msgspec.json.decode(json.dumps(EXAMPLES[verb.name]), type=verb.request)


def test_the_page_lists_the_variables_that_are_read_and_no_others() -> None:
    listed = {row.name for section in SECTIONS for row in section.rows if row.name.startswith("MUSTER_")}
    files = {f"{name}_FILE" for name in listed if name.endswith(("_PASSWORD", "_TOKEN"))}
    read = {name for section in SECTIONS for name in record(section) if name.startswith("MUSTER_")}
    for file in source_files(*PRODUCT):
        for node in ast.walk(file.tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                read |= set(re.findall(r"^MUSTER_[A-Z0-9_]*[A-Z0-9]$", node.value))
    prefixes = {"MUSTER_NATS", "MUSTER_REPLICA_NATS"}
    assert read - listed - files == INTERNAL.keys() | prefixes
    assert listed - read == set()


def test_every_variable_of_compose_is_on_the_page() -> None:
    text = (DIRECTORY / "variables.md").read_text(encoding="utf-8")
    names = set(re.findall(r"\$\{?(MUSTER_[A-Z_]+)", (ROOT / "compose.yaml").read_text(encoding="utf-8")))
    assert len(names) > 20
    limits = re.compile(r"MUSTER_[A-Z_]+_(MEMORY|CPUS|PIDS)")
    assert [name for name in sorted(names) if f"`{name}`" not in text and not limits.fullmatch(name)] == []
