"""Commands that only read, once or until Ctrl-C; and how every command is declared to typer."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

import msgspec
import typer

from muster.cli.output import Progress, print_json
from muster.cli.ports import AdminPort
from muster.cli.session import Session, StackChoice, get_session
from muster.client.address import StackAddress

_STACK = "Which stack"

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
NatsOption = Annotated[
    str | None,
    typer.Option(
        "--nats",
        metavar="URL",
        help="NATS servers, as nats://user:password@host:port (or MUSTER_NATS_URL).",
        rich_help_panel=_STACK,
    ),
]
CredsOption = Annotated[
    Path | None,
    typer.Option(
        "--creds",
        metavar="FILE",
        help="NATS credentials file, such as secrets/admin.creds (or MUSTER_NATS_CREDS).",
        rich_help_panel=_STACK,
    ),
]
UserOption = Annotated[
    str | None,
    typer.Option(
        "--user",
        metavar="USER",
        help="User of a NATS with plain users (or MUSTER_NATS_USER). Default: admin.",
        rich_help_panel=_STACK,
    ),
]
PasswordFileOption = Annotated[
    Path | None,
    typer.Option(
        "--password-file",
        metavar="FILE",
        help="File with the user's password (or MUSTER_NATS_PASSWORD_FILE, MUSTER_NATS_PASSWORD).",
        rich_help_panel=_STACK,
    ),
]
TimeoutOption = Annotated[
    float,
    typer.Option("--timeout-s", min=0.0, max=86_400.0, help="Seconds to wait for the change to finish."),
]
NoWaitOption = Annotated[
    bool,
    typer.Option("--no-wait", help="Return once the change is recorded, without waiting until it is done."),
]
DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Show what would happen to which replicas, and change nothing.")
]


Run = Callable[[typer.Context, dict[str, Any]], None]
"""Runs a command with the values of all its parameters by name."""


def parameter(name: str, annotation: Any, default: Any = None) -> inspect.Parameter:
    """A keyword-only parameter; ``annotation`` is as typer takes it."""
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def option(
    name: str, kind: Any, text: str, *, panel: str | None = None, metavar: str | None = None
) -> inspect.Parameter:
    """An optional option ``--name``, None when left out; with ``--no-name`` if ``kind`` is bool."""
    spelled = get_option_name(name)
    if kind is bool:
        spelled = f"{spelled}/--no-{spelled.removeprefix('--')}"
    declared = typer.Option(spelled, help=text, rich_help_panel=panel, metavar=metavar)
    return parameter(name, Annotated[kind | None, declared])


def get_option_name(name: str) -> str:
    """The option that sets the field ``name``."""
    return f"--{name.replace('_', '-')}"


STACK_OPTIONS = (
    parameter("as_json", JsonOption, default=False),
    parameter("nats", NatsOption),
    parameter("creds", CredsOption),
    parameter("user", UserOption),
    parameter("password_file", PasswordFileOption),
)
"""Options of every command that reaches a stack."""


def pop_stack_choice(values: dict[str, Any]) -> StackChoice:
    """Remove the options that choose a stack from ``values`` and return them."""
    return StackChoice(**{name: values.pop(name) for name in ("nats", "creds", "user", "password_file")})


def build_command(
    about: Callable[..., Any], run: Run, shared: Sequence[inspect.Parameter]
) -> Callable[..., None]:
    """Build a command with the name, help and keyword parameters of ``about``, followed by the shared ones.

    Parameters of ``about`` without an ``Annotated`` option or argument are hidden from typer; ``run`` supplies them.

    Why commands are composed: ``--json``, ``--dry-run`` or ``--nats`` must be the same everywhere, and no command may
    lack one of them.
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
    # Read by inspect and thus by typer; the type of functions does not declare it.
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    command.__name__, command.__qualname__ = about.__name__, about.__qualname__
    command.__module__, command.__doc__ = about.__module__, about.__doc__
    return command


_RETRY_S = 15.0
Reply = TypeVar("Reply")


class ReadRequest(msgspec.Struct, Generic[Reply], frozen=True):
    """A query to the controller, and how its reply is printed for a person."""

    ask: Callable[[AdminPort], Awaitable[Reply]]
    show: Callable[[Reply], None]


def query_command(build: Callable[..., ReadRequest[Any]]) -> Callable[..., None]:
    """Turn a function from ``(session, *, arguments)`` to `ReadRequest` into a command."""

    def run(context: typer.Context, values: dict[str, Any]) -> None:
        session = get_session(context)
        as_json = values.pop("as_json")
        choice = pop_stack_choice(values)
        with session.reporting(as_json=as_json):
            question = build(session, **values)
            answer = asyncio.run(_ask(session, session.find_stack(choice), question, build.__name__))
            if as_json:
                print_json(answer)
            else:
                question.show(answer)

    return build_command(build, run, STACK_OPTIONS)


async def _ask(session: Session, address: StackAddress, question: ReadRequest[Reply], title: str) -> Reply:
    with Progress(title.replace("_", " ").strip()) as progress:
        async with session.connect(address, progress, retry_for_s=_RETRY_S) as stack:
            return await question.ask(stack.admin)


CONTEXT_SETTINGS = {"help_option_names": ["-h", "--help"]}


def group(text: str) -> typer.Typer:
    """Create a group of commands, still empty; without arguments it prints its help."""
    return typer.Typer(
        help=text, no_args_is_help=True, add_completion=False, context_settings=CONTEXT_SETTINGS
    )


StreamRun = Callable[..., Coroutine[Any, Any, None]]
"""``(session, address, *, as_json, …)``"""


def stream_command(run: StreamRun) -> Callable[..., None]:
    """Turn an async function into a command; its own parameters are those annotated for typer.

    Ctrl-C ends it and is not a failure.
    """

    def command(context: typer.Context, values: dict[str, Any]) -> None:
        session = get_session(context)
        choice = pop_stack_choice(values)
        with session.reporting(as_json=values["as_json"]):
            address = session.find_stack(choice)
            try:
                asyncio.run(run(session, address, **values))
            except KeyboardInterrupt:
                return

    return build_command(run, command, STACK_OPTIONS)
