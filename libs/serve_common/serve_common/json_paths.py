"""Paths into JSON, as `$.user`, `$.items[*].name` or `$..email`; and values taken out of JSON by them. Pure.

A small part of RFC 9535: names, indices, ``*`` for every member or element, and ``..`` for any depth. Filters and
slices are left out: what is redacted must be plain to see from the path.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import msgspec

from serve_common.errors import BadField

PATH_LENGTH_MAX: Final = 256
PATHS_MAX: Final = 64
"""Maximum paths of one setting."""
_STEP: Final = re.compile(
    r"""
    (?P<deep>\.\.)?
    (?: (?P<dot>(?<!\.)\.)? (?P<name>[^\s.\[\]'"*$]+ | \*)
      | \[ (?: (?P<index>[0-9]{1,9} | \*) | '(?P<single>[^']*)' | "(?P<double>[^"]*)" ) \] )
    """,
    re.VERBOSE,
)
REDACTED: Final = "redacted"
"""Takes the place of a redacted text."""


class PathStep(NamedTuple):
    """One step of a path: into a member (text), an element (number), or all of them (None)."""

    key: str | int | None
    is_deep: bool = False
    """Whether the step is tried at every depth below, too."""


JsonPath = tuple[PathStep, ...]


def parse_json_path(text: str, field: str = "path") -> JsonPath:
    """Parse a path. Raises `BadField` naming ``field`` for one that is not understood."""
    steps: list[PathStep] = []
    at = 1
    if len(text) > PATH_LENGTH_MAX or not text.startswith("$"):
        raise BadField(field, f"{text[:80]!r} is no path; write one such as $.user or $.items[*].name")
    while at < len(text):
        found = _STEP.match(text, at)
        # A name needs one or two dots before it, an index in brackets at most two.
        if found is None or (found["name"] is not None) == (not (found["dot"] or found["deep"])):
            raise BadField(field, f"{text[:80]!r} is not understood from {text[at : at + 20]!r} on")
        steps.append(_build_step(found))
        at = found.end()
    return tuple(steps)


def _build_step(found: re.Match[str]) -> PathStep:
    is_deep = found["deep"] is not None
    if found["index"] is not None:
        return PathStep(None if found["index"] == "*" else int(found["index"]), is_deep)
    if found["name"] is not None:
        return PathStep(None if found["name"] == "*" else found["name"], is_deep)
    return PathStep(found["single"] if found["single"] is not None else found["double"], is_deep)


def parse_json_paths(texts: Iterable[str], field: str) -> tuple[JsonPath, ...]:
    """Parse several paths. Raises `BadField` with the number of the one that is not understood."""
    paths = tuple(parse_json_path(text, f"{field}[{at}]") for at, text in enumerate(texts))
    if len(paths) > PATHS_MAX:
        raise BadField(field, f"has {len(paths)} paths; at most {PATHS_MAX} are allowed")
    return paths


def redact_json(body: bytes, paths: Iterable[JsonPath]) -> bytes | None:
    """``body`` without the values at ``paths``; None when it is no JSON, so that nothing can be found in it.

    A redacted value keeps its type, so that code which expects a number or a list can still take it: a text becomes
    ``"redacted"``, a number 0, a bool false, and lists and objects become empty.
    """
    try:
        value, is_strict = decode_json(body)
        for path in paths:
            value = _redact(value, path)
        # msgspec would write NaN as null.
        return msgspec.json.encode(value) if is_strict else json.dumps(value, separators=(",", ":")).encode()
    except (ValueError, RecursionError):
        return None


def decode_json(body: bytes) -> tuple[Any, bool]:
    """The value of a JSON text, and whether it is strict JSON. Raises ValueError and RecursionError.

    Also NaN, infinities and lone surrogates are read, which programs do write: slower, as it is Python's decoder that
    takes them.
    """
    try:
        return msgspec.json.decode(body), True
    except (msgspec.DecodeError, UnicodeDecodeError):
        return json.loads(body), False


def _redact(value: Any, path: JsonPath) -> Any:
    if not path:
        return _blank(value)
    step, rest = path[0], path[1:]
    for key in _children(value):
        if _is_at(step, key):
            value[key] = _redact(value[key], rest)
        if step.is_deep:
            value[key] = _redact(value[key], path)
    return value


def _children(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return list(value)
    return range(len(value)) if isinstance(value, list) else ()


def _is_at(step: PathStep, key: str | int) -> bool:
    return step.key is None or (step.key == key and type(step.key) is type(key))


def _blank(value: Any) -> Any:
    if isinstance(value, str):
        return REDACTED
    return None if value is None else type(value)()


def is_below(place: tuple[str | int | None, ...], path: JsonPath) -> bool:
    """Whether a place in JSON is at ``path`` or within what is there. None in ``place`` is any element of a list."""
    if not path:
        return True
    if not place:
        return False
    step, key = path[0], place[0]
    is_there = step.key is None or (key is None and isinstance(step.key, int)) or _is_same(step.key, key)
    if is_there and is_below(place[1:], path[1:]):
        return True
    return step.is_deep and is_below(place[1:], path)


def _is_same(wanted: str | int, key: str | int | None) -> bool:
    return wanted == key and type(wanted) is type(key)
