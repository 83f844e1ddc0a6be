"""The page of the program `muster`: every command's help, from its parser."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import typer

from docs.generator.structs import GENERATED, table
from muster.cli.help import spell_argument, spell_option
from muster.cli.main import app
from muster.cli.session import EXIT_CODES_HELP

_HEAD: Final = f"""\
# The program `muster`

{GENERATED}
{EXIT_CODES_HELP}
"""


def page() -> str:
    """The page."""
    commands = list(_commands(typer.main.get_command(app), "muster"))
    leaves = [(path, command) for path, command in commands if not _subcommands(command)]
    listed = table(
        ("command", "what it does"),
        [(f"[`{path}`](#{path.replace(' ', '-')})", _first(c)) for path, c in leaves],
    )
    common = [option for option in commands[0][1].params if option.name != "version"]
    everywhere = {spell_option(option) for option in common}
    parts = [_HEAD, listed, f"## Options of every command that needs a stack\n\n{_options(common)}"]
    parts += [_section(path, command, everywhere) for path, command in leaves]
    return "\n".join(parts)


def _subcommands(command: Any) -> dict[str, Any]:
    return getattr(command, "commands", {})


def _commands(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    yield path, command
    for name, inner in _subcommands(command).items():
        if not inner.hidden:
            yield from _commands(inner, f"{path} {name}")


def _first(command: Any) -> str:
    return " ".join((command.help or "").split("\n\n")[0].split())


def _section(path: str, command: Any, everywhere: set[str]) -> str:
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [
        p for p in command.params if p not in arguments and spell_option(p) not in everywhere and not p.hidden
    ]
    usage = " ".join([path, *command.collect_usage_pieces(typer.Context(command))])
    parts = [f"## {path}\n", f"```\n{usage}\n```\n", _help(command.help or "")]
    if arguments:
        rows = [(f"`{spell_argument(p)}`", p.help or "") for p in arguments]
        parts.append(table(("argument", "meaning"), rows))
    if options:
        parts.append(_options(options))
    return "\n".join(parts)


def _help(text: str) -> str:
    """A help text, its indented lines as code."""
    lines: list[str] = []
    is_code = False
    for line in text.strip().splitlines():
        indented = line.startswith("  ") or (is_code and not line)
        if indented != is_code:
            lines.append("```")
        is_code = indented
        lines.append(line[2:] if is_code else line)
    return "\n".join([*lines, *(["```"] if is_code else [])]).replace("\n\n```\n", "\n```\n\n") + "\n"


def _options(options: list[Any]) -> str:
    rows = [
        (
            f"`{spell_option(option)}`",
            "required" if option.required else _default(option),
            option.help or "",
        )
        for option in options
    ]
    return table(("option", "default", "meaning"), rows)


def _default(option: Any) -> str:
    default = option.default
    if default is None or callable(default) or default in ((), [], "", False):
        return ""
    if isinstance(default, float):
        return f"`{default:g}`"
    return f"`{getattr(default, 'value', default)!s}`"
