"""`muster plan …`: any changing command with its arguments, as a dry run.

Why both this and ``--dry-run``: who wonders what a command would do looks for the word before looking for an option.
"""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from muster.cli.changing import DRY_RUN
from muster.cli.session import session_of
from muster.cli.signature import option_of
from serve_common.errors import BadField

ANY_ARGUMENTS = {
    "help_option_names": ["-h", "--help"],
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    # Options behind the first word belong to the command that is planned.
    "allow_interspersed_args": False,
}


def plan(context: typer.Context) -> None:
    """Show what a changing command would do, and change nothing.

    Examples:
      muster plan scale digits 3
      muster plan deploy digits:Digits --name digits --num-replicas 3
      muster plan traffic set digits v2

    Shows which replicas would start, stop or be reconfigured, and why.
    The same as the command with --dry-run.
    """
    session = session_of(context)
    root = context.find_root()
    words, command, rest = _named(root, context.args)
    with session.reporting(as_json="--json" in rest):
        if not words:
            raise BadField("plan", "needs a command, such as: muster plan scale digits 3")
        if not isinstance(command, TyperGroup):
            if all(each.name != DRY_RUN for each in command.params):
                raise BadField("plan", f"'{' '.join(words)}' changes nothing; there is nothing to plan")
            rest = [option_of(DRY_RUN), *rest]
    planned = root.command
    assert isinstance(planned, TyperGroup)
    _word, first, _rest = planned.resolve_command(root, words)
    assert first is not None
    with first.make_context(words[0], [*words[1:], *rest], parent=root) as inner:
        first.invoke(inner)


def _named(root: Any, arguments: list[str]) -> tuple[list[str], Any, list[str]]:
    """The words that name a command, the command, and its own arguments. Raises typer's error for unknown words."""
    words: list[str] = []
    command: Any = root.command
    rest = list(arguments)
    while rest and not rest[0].startswith("-") and isinstance(command, TyperGroup):
        word, found, rest = command.resolve_command(root, rest)
        words.append(word or "")
        command = found
    return words, command, rest
