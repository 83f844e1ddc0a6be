"""YAML files that know the line of each of their values, so that an error leads to what is to be corrected."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Any, final

from muster.cli import parsing
from serve_common.errors import BadField

ValuePath = Sequence[str | int]
"""Keys and indices from the root of a file to a value."""


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


def suggest(name: str, known: Iterable[str]) -> str:
    """``; did you mean …?`` for a misspelt name; empty when nothing known is like it."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
