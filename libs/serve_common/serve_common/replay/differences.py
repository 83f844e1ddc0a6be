"""Where two responses differ: by JSON path, status and content type.

Elements of a list share one path (``$.items[*].name``), so that a fault is counted once wherever in a list it shows. A
difference has a kind besides its path: a text that is random differs from itself in its value, and a version that
leaves it out still shows in the kind.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from enum import Enum
from typing import Any, Final, NamedTuple, final

import msgspec

from serve_common.errors import BadField
from serve_common.json_paths import JsonPath, decode_json, is_below, parse_json_path

STATUS: Final = "status"
CONTENT_TYPE: Final = "content-type"
BODY: Final = "body"
PARTS: Final = (STATUS, CONTENT_TYPE, BODY)
"""Parts of a response beside the values of its JSON."""
DIFFERENCES_MAX: Final = 200
"""Maximum differences of two responses; the rest is left out."""
KEYS_MAX: Final = 32
"""More members of one object than this on one side only are one difference of the object: they are data, not names."""
_EXAMPLE_LENGTH_MAX: Final = 200
_PLAIN: Final = re.compile(r"[^\s.\[\]'\"*$]+")

Place = tuple[str | int | None, ...]
"""Steps from the top of a JSON value; None is any element of a list."""


class ReplayedResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A response, as far as it is compared."""

    status: int
    content_type: str = ""
    body: bytes = b""


class DifferenceKind(Enum):
    """What is different at a path."""

    VALUE = "value"
    TYPE = "type"
    """Text and number, for instance; also JSON and anything else."""
    MISSING = "missing"
    """The other response lacks it."""
    ADDED = "added"
    """Only the other response has it."""
    LENGTH = "length"
    """Lists of different lengths."""
    MEMBERS = "members"
    """Objects of which many members are on one side only."""


class DifferenceKey(NamedTuple):
    """What is counted: a path, and what is different there."""

    path: str
    kind: DifferenceKind


class Example(msgspec.Struct, frozen=True):
    """Both sides of one difference as text; empty where there is nothing."""

    old: str
    new: str


Differences = dict[DifferenceKey, tuple[Any, Any]]
"""Differences with the values of both sides, of which `build_example` makes text."""
_MISSING: Final = object()


@final
class ResponseComparator:
    """Compares responses with a tolerance, without what is ignored."""

    def __init__(self, tolerance: float = 0.0, ignored: Iterable[str] = ()) -> None:
        """Numbers are equal when they differ by at most ``tolerance``, absolutely or relative to the larger one;
        two integers only when they are the same.

        ``ignored`` are JSON paths, with all below them, or some of `PARTS`. Raises `BadField` for one that is neither.
        """
        texts = list(ignored)
        self._tolerance = tolerance
        self._parts = frozenset(texts).intersection(PARTS)
        self._ignored: tuple[JsonPath, ...] = tuple(
            path for text in texts if (path := check_ignored_path(text)) is not None
        )

    def compare(self, old: ReplayedResponse, new: ReplayedResponse) -> Differences:
        """Every difference, with an example of it."""
        found: Differences = {}
        if old.status != new.status and STATUS not in self._parts:
            found[DifferenceKey(STATUS, DifferenceKind.VALUE)] = old.status, new.status
        if CONTENT_TYPE not in self._parts:
            types = _media_type(old.content_type), _media_type(new.content_type)
            if types[0] != types[1]:
                found[DifferenceKey(CONTENT_TYPE, DifferenceKind.VALUE)] = types
        if old.body != new.body and BODY not in self._parts:
            self._compare_bodies(old.body, new.body, found)
        return found

    def _compare_bodies(self, old: bytes, new: bytes, found: Differences) -> None:
        values = _parse_json(old), _parse_json(new)
        is_json = [value is not _MISSING for value in values]
        if all(is_json):
            whole: Differences = {}
            try:
                self._walk(values[0], values[1], (), whole)
            except RecursionError:
                is_json = [False, False]  # nested too deeply: compared as bytes
            else:
                found.update(whole)
                return
        kind = DifferenceKind.VALUE if is_json[0] == is_json[1] else DifferenceKind.TYPE
        found[DifferenceKey(BODY, kind)] = old, new

    def _walk(self, old: Any, new: Any, place: Place, found: Differences) -> None:
        if self._ignored and any(is_below(place, path) for path in self._ignored):
            return
        kind = _get_type(old)
        if kind != _get_type(new):
            self._add(place, DifferenceKind.TYPE, old, new, found)
        elif kind is dict:
            self._walk_members(old, new, place, found)
        elif kind is list:
            if len(old) != len(new):
                self._add(place, DifferenceKind.LENGTH, len(old), len(new), found)
            for one, other in zip(old, new, strict=False):
                self._walk(one, other, (*place, None), found)
        elif not (self._is_close(old, new) if kind is float else old == new):
            self._add(place, DifferenceKind.VALUE, old, new, found)

    def _walk_members(
        self, old: dict[str, Any], new: dict[str, Any], place: Place, found: Differences
    ) -> None:
        if len(old.keys() ^ new.keys()) > KEYS_MAX:
            self._add(place, DifferenceKind.MEMBERS, len(old), len(new), found)
        else:
            for key in old.keys() - new.keys():
                self._add((*place, key), DifferenceKind.MISSING, old[key], _MISSING, found)
            for key in new.keys() - old.keys():
                self._add((*place, key), DifferenceKind.ADDED, _MISSING, new[key], found)
        for key in old.keys() & new.keys():
            self._walk(old[key], new[key], (*place, key), found)

    def _add(self, place: Place, kind: DifferenceKind, old: Any, new: Any, found: Differences) -> None:
        if any(is_below(place, path) for path in self._ignored):
            return
        if len(found) < DIFFERENCES_MAX:
            found.setdefault(DifferenceKey(format_place(place), kind), (old, new))

    def _is_close(self, old: float, new: float) -> bool:
        if old == new or (old != old and new != new):  # noqa: PLR0124 - NaN
            return True
        if isinstance(old, int) and isinstance(new, int):
            return False  # numbers of things, and ids, are exact
        try:
            return math.isclose(old, new, rel_tol=self._tolerance, abs_tol=self._tolerance)
        except OverflowError:  # integers of any size
            return False


def format_place(place: Place) -> str:
    """A place as a JSON path."""
    parts = ["$"]
    for key in place:
        if key is None:
            parts.append("[*]")
        elif isinstance(key, int):
            parts.append(f"[{key}]")
        elif _PLAIN.fullmatch(key):
            parts.append(f".{key}")
        else:
            parts.append("[" + json.dumps(key) + "]")
    return "".join(parts)


def check_ignored_path(text: str, field: str = "ignore") -> JsonPath | None:
    """What a text leaves out of comparisons: a JSON path, or None for one of `PARTS`. Raises `BadField`."""
    if text in PARTS:
        return None
    try:
        return parse_json_path(text, field)
    except BadField as error:
        raise BadField(field, f"{error.reason}, or one of {', '.join(PARTS)}") from error


def _media_type(content_type: str) -> str:
    """The type without parameters: a boundary is random, and a charset changes nothing for JSON."""
    return content_type.partition(";")[0].strip().lower()


def _parse_json(body: bytes) -> Any:
    try:
        return decode_json(body)[0]
    except (ValueError, RecursionError):
        return _MISSING


def _get_type(value: Any) -> type:
    """The JSON type: all numbers are one."""
    return float if type(value) is int else type(value)


def build_example(values: tuple[Any, Any]) -> Example:
    """Both sides of a difference as short text."""
    return Example(_shown(values[0]), _shown(values[1]))


def _shown(value: Any) -> str:
    if value is _MISSING:
        return ""
    if isinstance(value, bytes):
        return f"{len(value)} bytes: {value[:60]!r}{'…' if len(value) > 60 else ''}"
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (ValueError, RecursionError):
        text = repr(type(value))
    return text if len(text) <= _EXAMPLE_LENGTH_MAX else f"{text[: _EXAMPLE_LENGTH_MAX - 1]}…"
