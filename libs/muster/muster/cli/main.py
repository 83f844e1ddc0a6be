"""The program `muster`: its commands and their common options."""

from __future__ import annotations

import logging
import sys
from importlib import metadata
from typing import Annotated

import structlog
import typer

from muster.cli.apps import app as application_app
from muster.cli.backend import app as backend_app
from muster.cli.backup import backup as back_up
from muster.cli.backup import restore, secrets
from muster.cli.deployments import ANY_ARGUMENTS, call, delete, deploy, plan, rollback, scale, shutdown
from muster.cli.deployments import app as goal_app
from muster.cli.endpoints import endpoint_app, http_app, traffic_app
from muster.cli.history import events, history, revisions
from muster.cli.logs import logs
from muster.cli.output import PlainFormatter, plain_event, stderr_for_logs
from muster.cli.queries import CONTEXT_SETTINGS, CredsOption, NatsOption, PasswordFileOption, UserOption
from muster.cli.session import EXIT_CODES_HELP, Session, StackChoice
from muster.cli.status import autoscaling_app, host_app, info, list_, proxy_app, snapshot, status
from muster.cli.top import top
from muster.cli.up import up

app = typer.Typer(
    name="muster",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings=CONTEXT_SETTINGS,
    epilog=EXIT_CODES_HELP,
)

_RUN, _DEPLOY, _INSPECT = "Run a stack", "Deploy and call", "Inspect"
_TRAFFIC, _OPERATE = "Backends and traffic, for more than one version at a time", "Operate"

for _panel, _commands in (
    (_RUN, (up, secrets)),
    (_DEPLOY, (deploy, scale, rollback, delete, call)),
    (_INSPECT, (status, list_, info, top, logs, events, history, revisions, snapshot)),
):
    for _command in _commands:
        app.command(_command.__name__.rstrip("_"), rich_help_panel=_panel)(_command)
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
app.command(rich_help_panel=_DEPLOY, context_settings=ANY_ARGUMENTS)(plan)
for _command in (back_up, restore, shutdown):
    app.command(_command.__name__, rich_help_panel=_OPERATE)(_command)


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
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Serve Python models behind HTTP: on this machine, in containers.

    Run a whole stack on this machine, until Ctrl-C:
      muster up --deploy-example

    Then, in another terminal:
      muster status
      muster deploy digits:Digits --name digits --route-prefix /digits \\
        --app-dir examples/digits

    Commands find the stack by themselves: the one that 'muster up' runs
    from .muster here or in a parent directory, or else that of compose
    whose 'secrets' directory is here or in a parent directory. For any
    other, give --nats URL before or after the command's name.
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
