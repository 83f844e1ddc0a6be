"""Completion in shells: the scripts, and the names that a stack knows."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from enum import Enum
from typing import Annotated, Any, Final

import typer

from muster.cli.output import print_line
from muster.cli.session import Session, StackChoice
from muster.client.admin import connect_stack
from muster.client.contexts import read_contexts
from serve_common.api.queries import (
    GetAllApplications,
    GetAllBackends,
    GetAllEndpoints,
    GetHosts,
    ListDeployments,
    PagedQuery,
)
from serve_common.errors import ServeError
from serve_common.names import short_name

VARIABLE: Final = "_MUSTER_COMPLETE"
"""The variable by which a shell asks the program for completions."""
_WITHIN_S: Final = 0.5
"""Seconds after which a shell gets no names: who types must not wait."""


class Shell(Enum):
    """A shell that completes."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


def completion(
    *, shell: Annotated[Shell, typer.Argument(metavar="SHELL", help="bash, zsh or fish.")]
) -> None:
    """Print the script by which a shell completes commands, options and names.

    Examples:
      source <(muster completion bash)
      muster completion zsh > ~/.zfunc/_muster
      muster completion fish > ~/.config/fish/completions/muster.fish

    The first line belongs into ~/.bashrc. Names of deployments and the like come from the stack that a command would
    reach, if it answers within half a second.
    """
    # Only here: it looks at the shell.
    from typer.completion import get_completion_script  # type: ignore[attr-defined]  # noqa: PLC0415 - as above

    print_line(get_completion_script(prog_name="muster", complete_var=VARIABLE, shell=shell.value))


def prepare_completion() -> None:
    """Register the shells, where a shell asks for completions."""
    if VARIABLE in os.environ:
        from typer.completion import completion_init  # type: ignore[attr-defined]  # noqa: PLC0415 - for shells only

        completion_init()


Complete = Callable[[typer.Context, list[str], str], list[str]]


def _names_from(query: PagedQuery[Any]) -> Complete:
    def complete(ctx: typer.Context, args: list[str], incomplete: str) -> list[str]:  # noqa: ARG001 - typer's signature
        try:
            names = asyncio.run(_fetch(ctx, query))
        except (ServeError, OSError, TimeoutError):
            return []  # a shell has no place for an error
        return sorted(name for name in map(short_name, names) if name.startswith(incomplete))

    return complete


async def _fetch(ctx: typer.Context, query: PagedQuery[Any]) -> list[str]:
    typed = {**ctx.find_root().params, **{name: value for name, value in ctx.params.items() if value}}
    choice = StackChoice(
        nats=typed.get("nats"),
        creds=typed.get("creds"),
        user=typed.get("user"),
        password_file=typed.get("password_file"),
        context=typed.get("context_name"),
    )
    session = ctx.obj if isinstance(ctx.obj, Session) else Session()
    address = session.find_stack(choice)
    async with (
        asyncio.timeout(_WITHIN_S),
        connect_stack(address, connect_within_s=0.0, retry_for_s=0.0) as stack,
    ):
        return [getattr(each, query.ordered_by) for each in await stack.admin.call(query)]


complete_deployment: Final = _names_from(ListDeployments())
complete_application: Final = _names_from(GetAllApplications())
complete_backend: Final = _names_from(GetAllBackends())
complete_endpoint: Final = _names_from(GetAllEndpoints())
complete_host: Final = _names_from(GetHosts())


def complete_context(ctx: typer.Context, args: list[str], incomplete: str) -> list[str]:  # noqa: ARG001 - typer's signature
    """Names of the user's contexts."""
    session = ctx.obj if isinstance(ctx.obj, Session) else Session()
    try:
        names = read_contexts(session.environment).contexts
    except ServeError:
        return []  # as above
    return sorted(name for name in names if name.startswith(incomplete))
