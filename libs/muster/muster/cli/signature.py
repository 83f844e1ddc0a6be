"""Commands as typer sees them: the parameters that are their own, and those that all commands of their kind have.

Why composed: ``--json``, ``--dry-run`` or ``--nats`` must be the same everywhere, and no command may lack them because
somebody forgot to repeat them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from muster.cli.connection import StackChoice
from muster.cli.options import CredsOption, JsonOption, NatsOption, PasswordFileOption, UserOption

Run = Callable[[typer.Context, dict[str, Any]], None]
"""Runs a command with the values of all its parameters by name."""


def parameter(name: str, annotation: Any, default: Any = None) -> inspect.Parameter:
    """One that is given by keyword; ``annotation`` is as typer takes it."""
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def option(
    name: str, kind: Any, text: str, *, panel: str | None = None, metavar: str | None = None
) -> inspect.Parameter:
    """``--name`` that may be left out, which is None; with ``--no-name`` where ``kind`` is bool."""
    spelled = option_of(name)
    if kind is bool:
        spelled = f"{spelled}/--no-{spelled.removeprefix('--')}"
    declared = typer.Option(spelled, help=text, rich_help_panel=panel, metavar=metavar)
    return parameter(name, Annotated[kind | None, declared])


def option_of(name: str) -> str:
    """The option that sets the field ``name``."""
    return f"--{name.replace('_', '-')}"


STACK_OPTIONS = (
    parameter("as_json", JsonOption, default=False),
    parameter("nats", NatsOption),
    parameter("creds", CredsOption),
    parameter("user", UserOption),
    parameter("password_file", PasswordFileOption),
)
"""Of every command that reaches a stack."""


def stack_choice(values: dict[str, Any]) -> StackChoice:
    """Take the stack that was named out of ``values``."""
    return StackChoice(**{name: values.pop(name) for name in ("nats", "creds", "user", "password_file")})


def composed(about: Callable[..., Any], run: Run, shared: Sequence[inspect.Parameter]) -> Callable[..., None]:
    """A command with the name, the help and the keyword parameters of ``about``, and the shared ones after them.

    A parameter of ``about`` that typer is not to see has no ``Annotated`` option or argument; ``run`` supplies it.
    """
    own = [
        each
        for each in inspect.signature(about, eval_str=True).parameters.values()
        if each.kind is inspect.Parameter.KEYWORD_ONLY and hasattr(each.annotation, "__metadata__")
    ]
    context = inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)

    def command(context: typer.Context, **values: Any) -> None:
        run(context, values)

    parameters = [context, *own, *shared]
    # What inspect reads, and with it typer; the type of functions does not know it.
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    command.__name__, command.__qualname__ = about.__name__, about.__qualname__
    command.__module__, command.__doc__ = about.__module__, about.__doc__
    return command
