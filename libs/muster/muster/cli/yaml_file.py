"""YAML files that know the line of each of their values, so that an error leads to what is to be corrected."""

from __future__ import annotations

import re
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar, final

import msgspec

from muster.cli import parsing
from serve_common.errors import BadField
from serve_common.values import suggest

ValuePath = Sequence[str | int]
"""Keys and indices from the root of a file to a value."""
FoundErrors = Iterator[tuple[ValuePath, str]]
"""What is wrong in a file: paths and reasons."""
T = TypeVar("T")

_AT: Final = re.compile(r" - at `\$?\.?(?P<path>[^`]*)`$")
_MISSING: Final = re.compile(r"Object missing required field `(?P<name>[^`]*)`")
_TYPES: Final = re.compile(r"Expected `(?P<wanted>[^`]*)`, got `(?P<got>[^`]*)`")

_TYPE_NAMES: Final = {
    "str": "text",
    "int": "a whole number",
    "float": "a number",
    "array": "a list",
    "object": "an object with fields",
}


@final
class YamlFile:
    """A file's value, limited to what JSON can represent, and its lines."""

    def __init__(self, text: str, name: str) -> None:
        """``name`` is for errors. Raises `BadField` for text that is no YAML, and for a key that is there twice."""
        # Only here: few commands read a file.
        import yaml  # noqa: PLC0415 - as above

        self.name = name
        self.value: Any = parsing.yaml_value(text, name)
        self._root: Any = yaml.compose(text, Loader=yaml.SafeLoader)
        self._check_unique(self._root, ())

    def find_line(self, path: ValuePath) -> int:
        """The line of a value, counted from 1, or of the innermost value around it that is there."""
        node, line = self._root, 1
        for step in path:
            found = self._step(node, step)
            if found is None:
                break
            node, line = found
        return line

    def build_error(self, path: ValuePath, reason: str) -> BadField:
        """The error that says what is wrong with a value, and where it is."""
        where = f"{self.name}:{self.find_line(path)}"
        return BadField(f"{where}: {spell_path(path)}" if path else where, reason)

    def convert(self, kind: type[T]) -> T:
        """The value as a struct. Raises `BadField` with the places of all unknown fields, or of what is wrong."""
        if unknown := [*find_unknown_fields(self.value, kind)]:
            raise self.build_errors(unknown)
        try:
            return msgspec.convert(self.value, kind)
        except msgspec.ValidationError as error:
            found = _describe_invalid(str(error))
            raise self.build_error(parse_path(found.field), found.reason) from error

    def build_errors(self, found: Iterable[tuple[ValuePath, str]]) -> BadField:
        """One error that has all of them, in the order of their lines; there must be one at least."""
        errors = [self.build_error(path, reason) for path, reason in sorted(found, key=self._get_place)]
        more = "".join(f"\n  {error.field}: {error.reason}" for error in errors[1:])
        return BadField(errors[0].field, f"{errors[0].reason}{more}")

    def _get_place(self, error: tuple[ValuePath, str]) -> tuple[int, str, str]:
        path, reason = error
        return self.find_line(path), spell_path(path), reason

    @staticmethod
    def _step(node: Any, step: str | int) -> tuple[Any, int] | None:
        if isinstance(step, int):
            if (
                not isinstance(node.value, list)
                or step >= len(node.value)
                or isinstance(node.value[step], tuple)
            ):
                return None
            return node.value[step], node.value[step].start_mark.line + 1
        for pair in node.value if isinstance(node.value, list) else ():
            if isinstance(pair, tuple) and pair[0].value == step:
                return pair[1], pair[0].start_mark.line + 1
        return None

    def _check_unique(self, node: Any, path: tuple[str | int, ...]) -> None:
        if node is None or not isinstance(node.value, list):
            return
        names = set[str]()
        for at, each in enumerate(node.value):
            if not isinstance(each, tuple):
                self._check_unique(each, (*path, at))
                continue
            key, inner = each
            inner_path = (*path, str(key.value))
            if str(key.value) in names:
                line = key.start_mark.line + 1
                raise BadField(f"{self.name}:{line}: {spell_path(inner_path)}", "is there twice")
            names.add(str(key.value))
            self._check_unique(inner, inner_path)


def spell_path(path: ValuePath) -> str:
    """The path as one would write it: ``applications[0].name``."""
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path).removeprefix(".")


def parse_path(text: str) -> list[str | int]:
    """The inverse of `spell_path`."""
    steps = text.replace("]", "").replace("[", ".").split(".")
    return [int(step) if step.isdigit() else step for step in steps if step]


def find_unknown_fields(value: Any, kind: Any, path: tuple[str | int, ...] = ()) -> FoundErrors:
    """Keys of a value that are no fields of ``kind``, a struct of msgspec or a model of Pydantic, or of what is in it.

    No field may be a mapping of structs or models.
    """
    fields = _get_fields(kind)
    if fields is not None:
        for name, inner in value.items() if isinstance(value, dict) else ():
            if name in fields:
                yield from find_unknown_fields(inner, fields[name], (*path, name))
            else:
                yield (*path, name), f"is unknown{suggest(name, fields)}"
        return
    for each in typing.get_args(kind):
        if isinstance(value, list):
            for at, inner in enumerate(value):
                yield from find_unknown_fields(inner, each, (*path, at))
        else:
            yield from find_unknown_fields(value, each, path)


def _get_fields(kind: Any) -> Mapping[str, Any] | None:
    """The types of a class's fields; None where it has none."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return {each.encode_name: each.type for each in msgspec.structs.fields(kind)}
    if isinstance(kind, type) and hasattr(kind, "model_fields"):
        return {name: each.annotation for name, each in kind.model_fields.items()}
    return None


def _describe_invalid(text: str) -> BadField:
    """What msgspec says of a value, in the words of the other errors."""
    found = _AT.search(text)
    at = "" if found is None else found["path"]
    text = _AT.sub("", text)
    missing = _MISSING.match(text)
    if missing is not None:
        return BadField(f"{at}.{missing['name']}" if at else missing["name"], "is missing")
    types = _TYPES.match(text)
    if types is None:
        return BadField(at, text)
    wanted, got = types["wanted"].removesuffix(" | null"), types["got"]
    quotes = "; put it in quotes" if wanted == "str" and got in {"int", "float", "bool"} else ""
    return BadField(at, f"must be {_TYPE_NAMES.get(wanted, wanted)}, not {got}{quotes}")
