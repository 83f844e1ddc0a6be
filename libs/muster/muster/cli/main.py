"""The program `muster`: its commands and what holds for all of them."""

from __future__ import annotations

import logging
import sys
from importlib import metadata
from typing import Annotated

import structlog
import typer

from muster.cli import (
    apps,
    autoscaling,
    backend,
    endpoint,
    goal,
    hosts,
    http_options,
    output,
    proxies,
    traffic,
)
from muster.cli.backup import backup as back_up
from muster.cli.backup import restore
from muster.cli.call import call
from muster.cli.connection import StackChoice
from muster.cli.deploy import deploy
from muster.cli.deployments import delete, rollback, scale
from muster.cli.events import events
from muster.cli.exit_codes import EXIT_CODES_HELP
from muster.cli.group import CONTEXT_SETTINGS
from muster.cli.logs import logs
from muster.cli.looking import info, list_, snapshot
from muster.cli.options import CredsOption, NatsOption, PasswordFileOption, UserOption
from muster.cli.plan import ANY_ARGUMENTS, plan
from muster.cli.record import history, revisions
from muster.cli.secrets import secrets
from muster.cli.session import Session
from muster.cli.shutdown import shutdown
from muster.cli.status import status
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

_RUN, _DEPLOY, _LOOK = "Run a stack", "Deploy and call", "Look"
_TRAFFIC, _OPERATE = "Backends and traffic, for more than one version at a time", "Operate"

for _panel, _commands in (
    (_RUN, (up, secrets)),
    (_DEPLOY, (deploy, scale, rollback, delete, call)),
    (_LOOK, (status, list_, info, top, logs, events, history, revisions, snapshot)),
):
    for _command in _commands:
        app.command(_command.__name__.rstrip("_"), rich_help_panel=_panel)(_command)
for _name, _group, _panel in (
    ("app", apps.app, _DEPLOY),
    ("backend", backend.app, _TRAFFIC),
    ("endpoint", endpoint.app, _TRAFFIC),
    ("traffic", traffic.app, _TRAFFIC),
    ("autoscaling", autoscaling.app, _OPERATE),
    ("host", hosts.app, _OPERATE),
    ("proxy", proxies.app, _OPERATE),
    ("http", http_options.app, _OPERATE),
    ("goal", goal.app, _OPERATE),
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
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print it and end.")
    ] = False,
) -> None:
    """Serve Python models behind HTTP: on this machine, in containers.

    A whole stack on this machine, until Ctrl-C:
      muster up --deploy-example

    Then, in another terminal:
      muster status
      muster deploy digits:Digits --name digits --route-prefix /digits \\
        --app-dir examples/digits

    Commands find the stack by themselves: the one that 'muster up' runs
    from .muster here or above, or else that of compose whose 'secrets'
    directory is here or above. Any other: --nats URL, before or after the
    command's name.
    """
    session = context.obj if isinstance(context.obj, Session) else Session()
    session.options = StackChoice(nats=nats, creds=creds, user=user, password_file=password_file)
    context.obj = session


def main() -> None:
    """The entry point."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(output.PlainFormatter(logging.BASIC_FORMAT))
    logging.basicConfig(handlers=[handler], level=logging.ERROR)
    structlog.configure(
        processors=[output.plain_event, *structlog.get_config()["processors"]],
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
        logger_factory=structlog.PrintLoggerFactory(file=output.stderr_for_logs()),
    )
    app(prog_name="muster")


if __name__ == "__main__":
    main()
