"""The program `muster`: its commands and their common options.

Why commands are imported at their first use: importing all of them takes several times as long as one takes to run.
"""

from __future__ import annotations

import gc
import importlib
import logging
import sys
from collections.abc import Iterator, MutableMapping
from typing import Annotated, Any, Final, NamedTuple

import typer

from muster.cli.completion import prepare_completion
from muster.cli.help import COMMON, OF_COMMAND, Commands, PlainGroup
from muster.cli.output import PlainFormatter, configure_logs
from muster.cli.queries import ContextOption, CredsOption, NatsOption, PasswordFileOption, UserOption
from muster.cli.session import EXIT_CODES_HELP, Session, StackChoice

_HOW_TO_STOP = "Ctrl-C stops what 'muster up' runs, and 'docker compose down' a stack in containers."


class _Command(NamedTuple):
    """Where a command, or a group of commands, is defined."""

    panel: str
    """The heading under which the help of the program lists it."""
    module: str
    """Module of this package."""
    attribute: str
    """Function of the command, or `Commands` of the group."""
    settings: dict[str, Any] = {}  # noqa: RUF012 - a default that nobody changes
    """Further arguments of `Commands.command`."""


_RUN, _DEPLOY, _INSPECT = "Run a stack", "Deploy and call", "Inspect"
_TRAFFIC, _OPERATE = "Canary and shadow traffic (several versions at a time)", "Operate"
_SAVE = "Save, restore and delete everything"

COMMANDS: Final = {
    "up": _Command(_RUN, "up", "up"),
    "start": _Command(_RUN, "serve", "start"),
    "secrets": _Command(_RUN, "backup", "secrets"),
    "console": _Command(_RUN, "console", "app"),
    "init": _Command(_RUN, "init", "init"),
    "context": _Command(_RUN, "contexts", "app"),
    "run": _Command(_DEPLOY, "run", "run"),
    "deploy": _Command(_DEPLOY, "deployments", "deploy"),
    "build": _Command(_DEPLOY, "serve", "build"),
    "update": _Command(_DEPLOY, "backend", "update"),
    "scale": _Command(_DEPLOY, "deployments", "scale"),
    "rollback": _Command(_DEPLOY, "deployments", "rollback"),
    "rollout": _Command(_DEPLOY, "rollouts", "app"),
    "revisions": _Command(_DEPLOY, "history", "revisions"),
    "delete": _Command(_DEPLOY, "deployments", "delete"),
    "call": _Command(_DEPLOY, "deployments", "call"),
    "status": _Command(_INSPECT, "status", "status"),
    "config": _Command(_INSPECT, "serve", "config"),
    "list": _Command(_INSPECT, "status", "list_"),
    "info": _Command(_INSPECT, "status", "info"),
    "doctor": _Command(_INSPECT, "doctor", "doctor"),
    "top": _Command(_INSPECT, "top", "top"),
    "logs": _Command(_INSPECT, "logs", "logs"),
    "events": _Command(_INSPECT, "history", "events"),
    "history": _Command(_INSPECT, "history", "history"),
    "backup": _Command(_SAVE, "backup", "backup"),
    "restore": _Command(_SAVE, "backup", "restore"),
    "delete-all": _Command(_SAVE, "deployments", "delete_all"),
    "shutdown": _Command(_SAVE, "serve", "shutdown"),
    "plan": _Command(_DEPLOY, "deployments", "plan", OF_COMMAND),
    "help": _Command(_RUN, "help", "help_", OF_COMMAND),
    "diff": _Command(_DEPLOY, "diff", "diff"),
    "completion": _Command(_RUN, "completion", "completion"),
    "app": _Command(_DEPLOY, "apps", "app"),
    "apply": _Command(_TRAFFIC, "apply", "apply"),
    "backend": _Command(_TRAFFIC, "backend", "app"),
    "capture": _Command(_TRAFFIC, "captures", "app"),
    "replay": _Command(_TRAFFIC, "replay", "replay"),
    "endpoint": _Command(_TRAFFIC, "endpoints", "endpoint_app"),
    "traffic": _Command(_TRAFFIC, "endpoints", "traffic_app"),
    "autoscaling": _Command(_OPERATE, "status", "autoscaling_app"),
    "host": _Command(_OPERATE, "status", "host_app"),
    "proxy": _Command(_OPERATE, "status", "proxy_app"),
    "http": _Command(_OPERATE, "endpoints", "http_app"),
    "goal": _Command(_OPERATE, "deployments", "app"),
}
"""Commands by name, in the order of the help."""


class _LoadedCommands(MutableMapping[str, Any]):
    """The commands as typer builds them, each at its first use."""

    def __init__(self) -> None:
        self._built: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._built:
            self._built[name] = _build(name, COMMANDS[name])
        return self._built[name]

    def __setitem__(self, name: str, command: Any) -> None:
        self._built[name] = command

    def __delitem__(self, name: str) -> None:
        del self._built[name]

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)


def _build(name: str, command: _Command) -> Any:
    found = getattr(importlib.import_module(f"muster.cli.{command.module}"), command.attribute)
    alone = Commands()
    if isinstance(found, Commands):
        alone.add_typer(found, name=name, rich_help_panel=command.panel)
    else:
        alone.command(name, rich_help_panel=command.panel, **command.settings)(found)
    if "structlog" in sys.modules:
        configure_logs()
    return typer.main.get_group(alone).commands[name]


class _Root(PlainGroup):
    """The program: for what users of other tools type, it says what to do here."""

    def __init__(self, **settings: Any) -> None:
        """Takes what `PlainGroup` takes."""
        super().__init__(**settings)
        self.commands = _LoadedCommands()

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Find the command. Raises typer's error for an unknown one."""
        if args[0] in {"down", "stop"}:
            ctx.fail(f"No such command '{args[0]}'. {_HOW_TO_STOP}")
        found = super().resolve_command(ctx, args)
        gc.enable()  # what a command imports is there; some run for hours
        return found


app = Commands(name="muster", cls=_Root, epilog=EXIT_CODES_HELP)


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        # Only here: it takes as long to import as typer.
        from importlib import metadata  # noqa: PLC0415 - as above

        typer.echo(f"muster {metadata.version('muster')}")
        raise typer.Exit


@app.callback()
def root(
    context: typer.Context,
    *,
    nats: NatsOption = None,
    creds: CredsOption = None,
    user: UserOption = None,
    password_file: PasswordFileOption = None,
    context_name: ContextOption = None,
    version: Annotated[  # noqa: ARG001 - its callback does it
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Print the version and exit.",
            rich_help_panel=COMMON,
        ),
    ] = False,
) -> None:
    """Serve Python models behind HTTP, on this machine or in containers.

    Run a whole stack on this machine, until Ctrl-C:
      muster up --deploy-example

    Or run it in containers, in a checkout of Muster:
      muster secrets
      docker compose up -d --build --wait

    Then, in another terminal:
      muster status
      muster deploy digits:Digits --name digits --route-prefix /digits \\
        --app-dir examples/digits

    Commands find the stack by themselves: the one that 'muster up' runs from .muster in this directory or a parent, or
    else the Docker Compose stack whose 'secrets' directory is in this directory or a parent. For any other, give
    --nats URL before or after the command's name, set MUSTER_NATS_URL, or name it with 'muster context'.
    """
    session = context.obj if isinstance(context.obj, Session) else Session()
    session.options = StackChoice(
        nats=nats, creds=creds, user=user, password_file=password_file, context=context_name
    )
    context.obj = session


def main() -> None:
    """Run the program."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(PlainFormatter(logging.BASIC_FORMAT))
    logging.basicConfig(handlers=[handler], level=logging.ERROR)
    prepare_completion()
    app(prog_name="muster")


if __name__ == "__main__":
    main()
