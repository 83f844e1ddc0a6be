"""What a PromQL expression speaks of: metrics, the filters and functions around them, and labels.

Why not a parser: whether it is PromQL at all is judged by Prometheus itself, in the tests that have one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

_GROUPING: Final = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")
_STRING: Final = re.compile(r'"(?:[^"\\]|\\.)*"')
_SELECTOR: Final = re.compile(r"(\w+\s*\(\s*)?\b([a-zA-Z_:][\w:]*)\b(?!\s*\()(\s*\{[^}]*\})?")
_MATCHER: Final = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"((?:[^"\\]|\\.)*)"')
_TYPE_NAMES: Final = {
    "and",
    "or",
    "unless",
    "bool",
    "offset",
    "by",
    "without",
    "on",
    "ignoring",
    "inf",
    "nan",
}
_DURATION: Final = re.compile(r"\[[^\]]*\]|\boffset\s+\w+")


@dataclass(frozen=True)
class Selector:
    """One use of a metric."""

    metric: str
    function: str
    """Directly around it; empty when there is none."""
    filters: tuple[tuple[str, str, str], ...]
    """Label, operator, value."""

    def __str__(self) -> str:
        matchers = ", ".join(f'{label}{operator}"{value}"' for label, operator, value in self.filters)
        return f"{self.metric}{{{matchers}}}"


def selectors(expr: str) -> list[Selector]:
    """Every use of a metric in ``expr``."""
    strings: list[str] = []

    def quarantine(found: re.Match[str]) -> str:
        strings.append(found[0])
        return f'"{len(strings) - 1}"'

    text = _STRING.sub(quarantine, expr)
    text = _DURATION.sub(" ", _GROUPING.sub(" ", text))
    return [
        Selector(
            name,
            (function or "").rstrip("( \n"),
            tuple(
                (label, operator, strings[int(value)][1:-1])
                for label, operator, value in _MATCHER.findall(braces or "")
            ),
        )
        for function, name, braces in _SELECTOR.findall(text)
        if name not in _TYPE_NAMES
    ]


def grouping_labels(expr: str) -> set[str]:
    """The labels in every ``by (…)`` and its like."""
    return {
        label.strip() for labels in _GROUPING.findall(expr) for label in labels.split(",") if label.strip()
    }
