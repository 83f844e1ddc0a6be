"""The SQL files are complete, and the parser refuses what is not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from serve_controller.adapters import postgres_store
from serve_controller.adapters.postgres_store import MIGRATIONS, QUERIES, ordered_migrations, parse_queries


def test_a_query_begins_with_its_name_and_purpose_and_ends_where_the_next_begins():
    text = "-- preamble\n\n-- name: one\n-- First.\nSELECT 1;\n\n-- name: two\n-- Second.\n-- More.\nSELECT\n2;\n"
    assert parse_queries(text) == {"one": "SELECT 1", "two": "SELECT\n2"}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("-- name:\n-- P.\nSELECT 1;", "no name"),
        ("-- name: a\n-- P.\nSELECT 1;\n-- name: a\n-- P.\nSELECT 1;", "'a' is defined twice"),
        ("-- name: a\nSELECT 1;", "'a' has no purpose"),
        ("-- name: a\n-- P.\n\n", "'a' has no body"),
    ],
)
def test_an_incomplete_query_is_refused_by_name(text, reason):
    with pytest.raises(ValueError, match=reason):
        parse_queries(text)


def test_every_query_is_used_and_ends_without_a_semicolon():
    source = Path(postgres_store.__file__).read_text(encoding="utf-8")
    assert set(re.findall(r'QUERIES\["(\w+)"\]', source)) == set(QUERIES)
    assert not [name for name, sql in QUERIES.items() if ";" in sql]


def test_migrations_are_put_in_order():
    assert [m.name for m in ordered_migrations({"0002_b.sql": "B", "0001_a.sql": "A"})] == ["a", "b"]
    assert MIGRATIONS[0].version == 1


@pytest.mark.parametrize(
    "names", [["first.sql"], ["0002_a.sql"], ["0001_a.sql", "0003_b.sql"], ["0001_a.sql", "0001_b.sql"]]
)
def test_a_migration_with_a_wrong_name_or_number_is_refused(names):
    with pytest.raises(ValueError, match=r"named|numbered"):
        ordered_migrations(dict.fromkeys(names, ""))
