"""`muster call`: one request to a model over NATS, without HTTP."""

from __future__ import annotations

import asyncio
import base64
import sys
from typing import Annotated, Any

import typer

from muster.cli import output, values_given
from muster.cli.connection import StackChoice
from muster.cli.options import CredsOption, JsonOption, NatsOption, PasswordFileOption, UserOption
from muster.cli.session import Session, session_of
from muster.client.ports import Answer
from serve_common.names import deployment_tag


def call(
    context: typer.Context,
    *,
    name: Annotated[str, typer.Argument(help="deployment or app/deployment.")],
    data: Annotated[
        str | None,
        typer.Option("--data", metavar="TEXT|@FILE|-", help="The body; '-' reads standard input."),
    ] = None,
    header: Annotated[
        list[str] | None, typer.Option("--header", metavar="'Name: value'", help="May be given again.")
    ] = None,
    timeout_s: Annotated[
        float, typer.Option("--timeout-s", min=0.1, max=3600.0, help="How long to wait, in seconds.")
    ] = 60.0,
    as_json: JsonOption = False,
    nats: NatsOption = None,
    creds: CredsOption = None,
    user: UserOption = None,
    password_file: PasswordFileOption = None,
) -> None:
    """Call a deployment and print its answer; byte for byte into a pipe.

    Example:
      muster call digits --data @examples/digits/sample.png

    It goes over NATS, as any NATS client can call, and so reaches a
    deployment without a route too.
    """
    session = session_of(context)
    with session.reporting(as_json=as_json):
        tag = deployment_tag(name)
        body = values_given.read_body(
            data, session.directory, sys.stdin.buffer.read() if data == "-" else None
        )
        headers = values_given.read_headers(header or ())
        stack = StackChoice(nats=nats, creds=creds, user=user, password_file=password_file)
        answer = asyncio.run(_call(session, stack, tag, body=body, headers=headers, timeout_s=timeout_s))
        if as_json:
            output.print_json({"headers": dict(answer.headers), **_body(answer.body)})
        else:
            output.write_body(answer.body)


async def _call(
    session: Session,
    options: StackChoice,
    name: str,
    *,
    body: bytes,
    headers: dict[str, str],
    timeout_s: float,
) -> Answer:
    with output.Progress(output.short_name(name)) as progress:
        async with session.connect(session.find_stack(options), progress) as stack:
            return await stack.caller.call(name, body, headers=headers, timeout_s=timeout_s)


def _body(body: bytes) -> dict[str, Any]:
    try:
        return {"body": body.decode()}
    except UnicodeDecodeError:
        return {"body_base64": base64.b64encode(body).decode()}
