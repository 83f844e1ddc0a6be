"""`muster up`: the whole stack on this machine, from one command until Ctrl-C."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from muster.cli.options import JsonOption
from muster.cli.session import Session, session_of
from muster.cli.up_report import UpReport
from muster.cli.up_run import UpRun
from muster.embedded.options import DEFAULT_STATE_DIR, StackOptions


def up(
    context: typer.Context,
    *,
    state_dir: Annotated[
        Path, typer.Option("--state-dir", metavar="DIR", help="Where all state lies; made when not there.")
    ] = DEFAULT_STATE_DIR,
    http_host: Annotated[
        str, typer.Option("--http-host", help="Where HTTP listens; 0.0.0.0 is everywhere.")
    ] = "127.0.0.1",
    http_port: Annotated[
        int, typer.Option("--http-port", min=0, max=65_535, help="0 takes any free one.")
    ] = 8000,
    nats_port: Annotated[
        int, typer.Option("--nats-port", min=0, max=65_535, help="Another is taken when it is in use.")
    ] = 4222,
    num_cpus: Annotated[
        int | None, typer.Option("--num-cpus", min=1, help="CPUs for replicas in all; the machine's.")
    ] = None,
    proxy_processes: Annotated[
        int, typer.Option("--proxy-processes", min=1, max=64, help="How many share the HTTP port.")
    ] = 1,
    deploy_example: Annotated[
        bool, typer.Option("--deploy-example", help="Deploy examples/digits unless it is there.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Run a whole stack on this machine until Ctrl-C.

    Example:
      muster up --deploy-example

    NATS, Postgres, a controller, a replica host with Ray and a proxy, each
    started again when it dies. Its state is kept: what is deployed is back
    at the next start. Ctrl-C stops it in order, a second one at once.
    """
    session = session_of(context)
    with session.reporting(as_json=as_json):
        options = StackOptions(
            http_host=http_host,
            http_port=http_port,
            nats_port=nats_port,
            num_cpus=num_cpus,
            proxy_processes=proxy_processes,
        )
        report = UpReport(directory=session.directory, as_json=as_json)
        asyncio.run(
            _run(session, session.directory / state_dir, options, report, deploy_example=deploy_example)
        )


async def _run(
    session: Session, state_dir: Path, options: StackOptions, report: UpReport, *, deploy_example: bool
) -> None:
    stack = session.make_embedded(
        state_dir, options, on_event=report.hear_event, on_notice=report.hear_notice
    )
    await UpRun(session, stack, report).run(deploy_example=deploy_example)
