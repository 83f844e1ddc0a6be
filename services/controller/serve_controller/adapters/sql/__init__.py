"""The SQL of the store, read from the files beside this one.

Why files: SQL is read, reviewed and tried in psql as SQL, and every query has a name and a purpose. Nothing
is composed at run time.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.resources import files
from typing import Final

import msgspec

_NAME = re.compile(r"^-- name:[ \t]*(\w*)[ \t]*$", re.MULTILINE)
_PURPOSE = re.compile(r"\n-- \S[^\n]*\n")
_MIGRATION = re.compile(r"(\d{4})_(\w+)\.sql")


class Migration(msgspec.Struct, frozen=True):
    """One step of the schema."""

    version: int
    """1, 2, 3 … without a gap."""
    name: str
    sql: str


def parse_queries(text: str) -> dict[str, str]:
    """The queries in ``text`` by name.

    A query begins with the line ``-- name: <name>``, followed by a comment line with its purpose, and ends where the
    next one begins. Text before the first is a preamble. Raises ValueError for a query without name, purpose or body
    and for a name that is used twice.
    """
    _, *parts = _NAME.split(text)
    queries: dict[str, str] = {}
    for name, body in zip(parts[::2], parts[1::2], strict=True):
        if not name:
            raise ValueError("a query has no name")
        if name in queries:
            raise ValueError(f"query {name!r} is defined twice")
        if _PURPOSE.match(body) is None:
            raise ValueError(f"query {name!r} has no purpose: a comment line must follow its name")
        sql = "\n".join(line for line in body.splitlines() if not line.startswith("--")).strip()
        if not sql:
            raise ValueError(f"query {name!r} has no body")
        queries[name] = sql.removesuffix(";")
    return queries


def ordered_migrations(texts: Mapping[str, str]) -> list[Migration]:
    """The migrations in the order of their numbers, from the texts by file name, such as
    ``0001_initial.sql``.

    Raises ValueError when a name is not of that form or a number is missing or used twice.
    """
    found: list[Migration] = []
    for file_name, sql in sorted(texts.items()):
        matched = _MIGRATION.fullmatch(file_name)
        if matched is None:
            raise ValueError(f"migration {file_name!r} is not named like 0001_initial.sql")
        found.append(Migration(int(matched[1]), matched[2], sql))
    if [migration.version for migration in found] != list(range(1, len(found) + 1)):
        raise ValueError(f"migrations are not numbered 1, 2, 3 …: {sorted(texts)}")
    return found


def _read_migrations() -> list[Migration]:
    folder = files(__name__) / "migrations"
    return ordered_migrations(
        {entry.name: entry.read_text(encoding="utf-8") for entry in folder.iterdir() if entry.is_file()}
    )


QUERIES: Final[Mapping[str, str]] = parse_queries(
    (files(__name__) / "queries.sql").read_text(encoding="utf-8")
)
MIGRATIONS: Final[list[Migration]] = _read_migrations()
