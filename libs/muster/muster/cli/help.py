"""How `muster --help` reads: plain text that wraps at spaces, with options and commands under headings.

Why not typer's own boxes: their columns cut names of options, defaults and values at 80 columns, and each name must be
readable to be typed.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from types import MethodType
from typing import Any, Final, TypeVar

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

_CONTEXT_SETTINGS: Final = {
    "help_option_names": ["-h", "--help"],
    "max_content_width": 100,
}
OF_COMMAND: Final[dict[str, Any]] = {
    "options_metavar": "COMMAND [ARGS]...",
    "context_settings": {
        **_CONTEXT_SETTINGS,
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        # Options after the first word belong to the other command.
        "allow_interspersed_args": False,
    },
}
"""Settings of a command whose arguments are another command."""

Function = TypeVar("Function", bound=Callable[..., Any])

COMMON: Final = "Common options"
WHICH_STACK: Final = "Which stack"
_LAST: Final = (COMMON, WHICH_STACK)
"""Headings after all others: these options are the same in most commands."""
_COLUMN_MAX: Final = 28
"""Widest column of names of options."""


class _QuickValues:
    """Reads the plain values of one parameter, and leaves all else to typer.

    Why: typer reads every value by pydantic, and importing that takes as long as all else that a command does.
    """

    def __init__(self, parameter: Any) -> None:
        """``parameter`` is typer's, as built from the command's signature."""
        self._kind = parameter.type_descriptor.annotation
        self._info = parameter.type_descriptor.parameter_info
        self._is_list = parameter.multiple or parameter.nargs != 1
        self._typer = parameter.get_runtime_param

    def coerce(self, value: Any, param: Any, ctx: Any) -> Any:
        """The value as its type; raises typer's error, in typer's words, for a bad one."""
        found = None if self._is_list else self._read(value)
        return found if found is not None or value is None else self._typer().coerce(value, param, ctx)

    def _read(self, value: Any) -> Any:
        """The value; None for what is not plain, or is not as it should be."""
        match value:
            case str() if self._kind is str:
                return value
            case str() | Path() if self._kind is Path and not self._info.resolve_path:
                return Path(value)
            case bool() if self._kind is bool:
                return value
            case str() if self._kind in {int, float} and _NUMBERS[self._kind].fullmatch(value):
                return self._within_limits(self._kind(value))
            case int() | float() if self._kind in {int, float} and type(value) is not bool:
                return self._within_limits(self._kind(value)) if self._kind(value) == value else None
            case _:
                return None

    def _within_limits(self, number: float) -> float | None:
        least, most = self._info.min, self._info.max
        is_good = (least is None or number >= least) and (most is None or number <= most)
        return number if is_good else None


_NUMBERS: Final[dict[type, re.Pattern[str]]] = {
    int: re.compile(r"[+-]?[0-9]{1,15}"),
    float: re.compile(r"[+-]?[0-9]{1,15}(\.[0-9]{1,15})?"),
}


def _read_quickly(parameters: list[Any]) -> list[Any]:
    for each in parameters:
        if isinstance(each.get_runtime_param, MethodType):
            quick = _QuickValues(each)
            each.get_runtime_param = lambda quick=quick: quick
    return parameters


class PlainCommand(TyperCommand):
    """A command with plain help."""

    def get_params(self, ctx: Any) -> list[Any]:
        """All parameters, that of the help included."""
        return _read_quickly(super().get_params(ctx))

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """The words after the command in its line of usage."""
        return _usage(self, ctx)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write usage, text and options."""
        self.format_usage(ctx, formatter)
        _write_text(formatter, self.help or "")
        _write_parameters(formatter, self.get_params(ctx))


class PlainGroup(TyperGroup):
    """A group of commands with plain help."""

    def get_params(self, ctx: Any) -> list[Any]:
        """All parameters, that of the help included."""
        return _read_quickly(super().get_params(ctx))

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """The words after the group in its line of usage."""
        return [*_usage(self, ctx), self.subcommand_metavar]

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write usage, text, commands and options."""
        self.format_usage(ctx, formatter)
        _write_text(formatter, self.help or "")
        panels: dict[str, list[tuple[str, str]]] = {}
        for name, command in self.commands.items():
            if not command.hidden:
                heading = getattr(command, "rich_help_panel", None) or "Commands"
                panels.setdefault(heading, []).append((name, _summary(command.help or "")))
        for heading, rows in panels.items():
            _write_rows(formatter, heading, rows, max(map(len, self.commands)))
        _write_parameters(formatter, self.get_params(ctx))
        _write_text(formatter, self.epilog or "")


class Commands(typer.Typer):
    """A set of commands whose help is plain; without arguments it prints its help."""

    def __init__(self, *, cls: type[PlainGroup] = PlainGroup, **settings: Any) -> None:
        """Takes what `typer.Typer` takes, such as ``help``."""
        super().__init__(
            cls=cls,
            no_args_is_help=True,
            add_completion=False,
            pretty_exceptions_enable=False,
            rich_markup_mode=None,
            context_settings=_CONTEXT_SETTINGS,
            **settings,
        )

    def command(self, name: str | None = None, **settings: Any) -> Callable[[Function], Function]:
        """Register a function as a command."""
        return super().command(name, cls=PlainCommand, **settings)


def help_(context: typer.Context) -> None:
    """Show the help of a command, as --help does.

    Example:
      muster help traffic set
    """
    found, _rest = find_command(context.find_root(), context.args)
    typer.echo(found.command.get_help(found))


def find_command(root: Any, arguments: Sequence[str]) -> tuple[Any, list[str]]:
    """The context of the command that ``arguments`` begin with, below ``root``, and the remaining arguments.

    Raises typer's error for an unknown command.
    """
    found, rest = root, list(arguments)
    while rest and not rest[0].startswith("-") and isinstance(found.command, TyperGroup):
        word, command, rest = found.command.resolve_command(found, rest)
        found = type(root)(command, info_name=word, parent=found)
    return found, rest


def _summary(text: str) -> str:
    """The first paragraph as one line."""
    return " ".join(text.partition("\n\n")[0].split())


def _usage(command: Any, ctx: Any) -> list[str]:
    arguments = (each for each in command.get_params(ctx) if isinstance(each, TyperArgument))
    return [command.options_metavar, *(spell_argument(each) for each in arguments)]


def spell_argument(argument: TyperArgument) -> str:
    """The argument as in a line of usage."""
    name = argument.metavar or (argument.name or "").upper()
    return name if argument.required else f"[{name}]"


def _write_text(formatter: Any, text: str) -> None:
    """Write a docstring: prose is wrapped, and lines that are indented (examples) stay as they are."""
    for paragraph in text.split("\n\n") if text else ():
        formatter.write_paragraph()
        for is_example, lines in groupby(paragraph.splitlines(), lambda line: line.startswith("  ")):
            if is_example:
                formatter.write("".join(f"{line}\n" for line in lines))
            else:
                formatter.write("".join(f"{line}\n" for line in _wrap(" ".join(lines), formatter.width)))


def _write_parameters(formatter: Any, parameters: Iterable[Any]) -> None:
    sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
    for each in parameters:
        if isinstance(each, TyperArgument):
            sections["Arguments"].append((spell_argument(each), each.help or ""))
        elif isinstance(each, TyperOption) and not each.hidden:
            heading = COMMON if each.name == "help" else each.rich_help_panel or "Options"
            sections.setdefault(heading, []).append((spell_option(each), _option_text(each)))
    for heading in sorted(sections, key=lambda name: _LAST.index(name) if name in _LAST else -1):
        if rows := sections[heading]:
            _write_rows(formatter, heading, rows, min(_COLUMN_MAX, max(len(name) for name, _text in rows)))


def _write_rows(formatter: Any, heading: str, rows: Iterable[tuple[str, str]], column: int) -> None:
    """Write names and texts in two columns; the text of a name that is too long for its column begins below it."""
    indent = " " * (column + 4)
    formatter.write_paragraph()
    formatter.write_heading(heading)
    for name, text in rows:
        lines = [f"{indent}{line}" for line in _wrap(text, formatter.width - len(indent))]
        if len(name) > column:
            lines.insert(0, f"  {name}")
        else:
            lines[0] = f"  {name:<{column}}  {lines[0].lstrip()}"
        formatter.write("".join(f"{line}\n" for line in lines))


def _wrap(text: str, width: int) -> list[str]:
    """Lines that are broken at spaces only: a value or an option that is broken elsewhere could not be copied."""
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False)


def spell_option(option: TyperOption) -> str:
    """All spellings, the short one first, with the metavar."""
    names = ", ".join(sorted((*option.opts, *option.secondary_opts), key=lambda name: name.startswith("--")))
    return names if option.is_flag else f"{names} {option.metavar}"


def _option_text(option: TyperOption) -> str:
    return " ".join(_sentences(option))


def _sentences(option: TyperOption) -> Iterator[str]:
    yield option.help or ""
    if option.required:
        yield "Required."
    elif option.default is not None and not option.is_flag:
        default = option.default
        yield f"Default: {f'{default:g}' if isinstance(default, float) else default}."
