"""The program `muster`: its commands and their common options."""

from __future__ import annotations

import logging
import sys
from importlib import metadata
from typing import Annotated, Any

import structlog
import typer

from muster.cli.apps import app as application_app
from muster.cli.backend import app as backend_app
from muster.cli.backend import update
from muster.cli.backup import backup as back_up
from muster.cli.backup import restore, secrets
from muster.cli.deployments import app as goal_app
from muster.cli.deployments import call, delete, delete_all, deploy, plan, rollback, scale
from muster.cli.endpoints import endpoint_app, http_app, traffic_app
from muster.cli.help import COMMON, OF_COMMAND, Commands, PlainGroup, help_
from muster.cli.history import events, history, revisions
from muster.cli.logs import logs
from muster.cli.output import PlainFormatter, plain_event, stderr_for_logs
from muster.cli.queries import CredsOption, NatsOption, PasswordFileOption, UserOption
from muster.cli.session import EXIT_CODES_HELP, Session, StackChoice
from muster.cli.status import autoscaling_app, host_app, info, list_, proxy_app, status
from muster.cli.top import top
from muster.cli.up import up

_HOW_TO_STOP = "Ctrl-C stops what 'muster up' runs, and 'docker compose down' a stack in containers."


class _Root(PlainGroup):
    """The program: for what users of other tools type, it says what to do here."""

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Find the command. Raises typer's error for an unknown one."""
        if args[0] in {"down", "stop"}:
            ctx.fail(f"No such command '{args[0]}'. {_HOW_TO_STOP}")
        return super().resolve_command(ctx, args)


app = Commands(name="muster", cls=_Root, epilog=EXIT_CODES_HELP)

_RUN, _DEPLOY, _INSPECT = "Run a stack", "Deploy and call", "Inspect"
_TRAFFIC, _OPERATE = "Canary and shadow traffic (several versions at a time)", "Operate"
_SAVE = "Save, restore and delete everything"

for _panel, _commands in (
    (_RUN, (up, secrets)),
    (_DEPLOY, (deploy, update, scale, rollback, revisions, delete, call)),
    (_INSPECT, (status, list_, info, top, logs, events, history)),
    (_SAVE, (back_up, restore, delete_all)),
):
    for _command in _commands:
        _name = _command.__name__.rstrip("_").replace("_", "-")
        app.command(_name, rich_help_panel=_panel)(_command)
for _name, _group, _panel in (
    ("app", application_app, _DEPLOY),
    ("backend", backend_app, _TRAFFIC),
    ("endpoint", endpoint_app, _TRAFFIC),
    ("traffic", traffic_app, _TRAFFIC),
    ("autoscaling", autoscaling_app, _OPERATE),
    ("host", host_app, _OPERATE),
    ("proxy", proxy_app, _OPERATE),
    ("http", http_app, _OPERATE),
    ("goal", goal_app, _OPERATE),
):
    app.add_typer(_group, name=_name, rich_help_panel=_panel)
app.command("plan", rich_help_panel=_DEPLOY, **OF_COMMAND)(plan)
app.command("help", rich_help_panel=_RUN, **OF_COMMAND)(help_)


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
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
    --nats URL before or after the command's name, or set MUSTER_NATS_URL.
    """
    session = context.obj if isinstance(context.obj, Session) else Session()
    session.options = StackChoice(nats=nats, creds=creds, user=user, password_file=password_file)
    context.obj = session


def main() -> None:
    """Entry point of the program."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(PlainFormatter(logging.BASIC_FORMAT))
    logging.basicConfig(handlers=[handler], level=logging.ERROR)
    structlog.configure(
        processors=[plain_event, *structlog.get_config()["processors"]],
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
        logger_factory=structlog.PrintLoggerFactory(file=stderr_for_logs()),
    )
    app(prog_name="muster")


if __name__ == "__main__":
    main()
