"""Configurations as lines, their differences, and what in them is not the default."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from serve_console.core.line_diff import compare_lines
from serve_console.core.plain_text import clean_text

LINES_MAX: Final = 400
"""Most lines of one difference."""
_CONTEXT: Final = 2
_VALUE_MAX: Final = 400
_DEPTH_MAX: Final = 8


class Setting(msgspec.Struct, frozen=True):
    """One field of a configuration."""

    name: str
    value: str
    default: str
    """Empty: it has none."""
    is_changed: bool
    """Whether it differs from its default."""

    @property
    def is_shown(self) -> bool:
        """Whether it was chosen: it differs from its default, or has none."""
        return self.is_changed or not self.default


class SettingGroup(msgspec.Struct, frozen=True):
    """The fields of one struct."""

    title: str
    settings: list[Setting]

    @property
    def changed(self) -> int:
        """How many differ from their defaults."""
        return sum(setting.is_changed for setting in self.settings)


def list_settings(title: str, value: msgspec.Struct) -> SettingGroup:
    """Every field with its value; fields of nested structs are named ``outer.inner``."""
    return SettingGroup(title, _list_fields(value, ""))


def _list_fields(value: msgspec.Struct, prefix: str) -> list[Setting]:
    found: list[Setting] = []
    for field in msgspec.structs.fields(value):
        current = getattr(value, field.name)
        has_default = field.default is not msgspec.NODEFAULT
        has_factory = field.default_factory is not msgspec.NODEFAULT
        default = field.default if has_default else field.default_factory() if has_factory else None
        if isinstance(current, msgspec.Struct) and not prefix:
            found += _list_fields(current, f"{field.name}.")
            continue
        found.append(
            Setting(
                f"{prefix}{field.name}",
                format_value(current),
                format_value(default) if has_default or has_factory else "",
                (has_default or has_factory) and current != default,
            )
        )
    return found


def format_value(value: Any) -> str:
    """A value in one line: JSON, but texts without quotes and ``none`` for nothing."""
    plain = msgspec.to_builtins(value)
    if plain is None:
        return "none"
    if isinstance(plain, str):
        text = plain or "empty"
    elif isinstance(plain, float) and plain.is_integer() and abs(plain) < 1e15:
        text = f"{plain:.0f}"
    else:
        text = msgspec.json.encode(plain).decode()
    return clean_text(text, _VALUE_MAX)


def build_lines(value: Any) -> list[str]:
    """A stored object as indented lines, sorted by name, one for each value."""
    lines: list[str] = []
    _add_lines(lines, value, 0)
    return lines


def _add_lines(lines: list[str], value: Any, depth: int) -> None:
    if not isinstance(value, Mapping):
        if value is not None:
            lines.append(f"{'  ' * depth}{format_value(value)}")
        return
    for name in sorted(value, key=str):
        inner = value[name]
        label = f"{'  ' * depth}{clean_text(str(name), 200)}:".replace("\n", " ")
        if isinstance(inner, Mapping) and inner and depth < _DEPTH_MAX:
            lines.append(label)
            _add_lines(lines, inner, depth + 1)
        else:
            text = format_value(inner)
            lines += [f"{label} {text}".replace("\n", " ")]


def build_diff(old: Any, new: Any) -> list[str]:
    """The difference of two stored objects, as the macro ``diff`` takes it; empty: they are the same."""
    found = list(compare_lines(build_lines(old), build_lines(new), _CONTEXT))
    if len(found) > LINES_MAX:
        left_out = len(found) - LINES_MAX
        return [*found[:LINES_MAX], f"@@ {left_out} more lines are left out @@"]
    return found
