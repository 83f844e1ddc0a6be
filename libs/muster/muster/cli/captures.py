"""`muster capture …`: which requests of an endpoint proxies capture, and what was captured."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Final

import typer

from muster.cli.changes import ChangeRequest, change_command
from muster.cli.completion import complete_endpoint
from muster.cli.help import Commands
from muster.cli.output import Cell, Progress, format_time, print_json, print_table, table
from muster.cli.queries import ReadRequest, query_command, stack_command
from muster.cli.session import Session, StackChoice
from muster.client.admin import Stack
from serve_common.api.commands import SetCapture
from serve_common.api.queries import GetCaptures
from serve_common.api.views import CaptureView
from serve_common.config.capture import CaptureConfig, check_capture_config
from serve_common.errors import BadField
from serve_common.names import EndpointTag, deployment_tag, short_name
from serve_common.protocol.captures import BodyState, CapturedMessage, CapturedPair

app = Commands(
    help="""Capture real requests of an endpoint with their responses, to replay them: set, off, list, show.

    Off by default. A captured request is redacted in the proxy, before it is stored anywhere. The newest 10,000 of an
    endpoint and 64 MiB in all are retained, for a day.
    """
)
EndpointName = Annotated[
    str,
    typer.Argument(
        metavar="NAME",
        help="Name of the endpoint; that of a deployment has the deployment's name.",
        autocompletion=complete_endpoint,
    ),
]
LimitOption = Annotated[
    int,
    typer.Option("--limit", metavar="N", min=1, max=10_000, help="At most so many, the newest ones."),
]
_BODY_LENGTH_MAX: Final = 60


@change_command()
def set_(
    *,
    name: EndpointName,
    share: Annotated[
        str, typer.Argument(metavar="SHARE", help="Share of the requests to capture, such as 1% or 0.01.")
    ],
    bodies: Annotated[
        bool,
        typer.Option(
            "--bodies", help="Capture bodies of at most 64 KiB too; a replay needs those of requests."
        ),
    ] = False,
    redact: Annotated[
        list[str] | None,
        typer.Option(
            "--redact",
            metavar="JSON_PATH",
            help="Redact values in JSON bodies, such as '$.user', '$.items[*].name' or '$..email'; may be repeated. "
            "Bodies that are not JSON are then left out.",
        ),
    ] = None,
    redact_header: Annotated[
        list[str] | None,
        typer.Option("--redact-header", metavar="NAME", help="Redact another header; may be repeated."),
    ] = None,
    redact_query: Annotated[
        list[str] | None,
        typer.Option(
            "--redact-query", metavar="NAME", help="Redact another query parameter; may be repeated."
        ),
    ] = None,
) -> ChangeRequest:
    """Capture a share of an endpoint's requests, and wait until every proxy does so.

    Examples:
      muster capture set hello 1%
      muster capture set hello 1% --bodies --redact '$.user'

    The options replace all earlier ones. Authorization, cookies, and headers and query parameters that are named like
    keys, tokens or passwords are always redacted. What was captured before stays as it is.
    """
    tag = deployment_tag(name)
    config = check_capture_config(
        CaptureConfig(
            share=_parse_share(share),
            bodies=bodies,
            redact=redact or [],
            redact_headers=redact_header or [],
            redact_query=redact_query or [],
        )
    )
    return ChangeRequest(
        command=SetCapture(
            endpoint=tag,
            share=config.share,
            bodies=config.bodies,
            redact=config.redact,
            redact_headers=config.redact_headers,
            redact_query=config.redact_query,
        ),
        what=f"capture of {short_name(tag)}",
        done="is set",
        already="is that way already",
        progress_command="muster capture list",
    )


def _parse_share(text: str) -> float:
    number = text.strip()
    try:
        share = float(number.removesuffix("%")) / (100 if number.endswith("%") else 1)
    except ValueError as error:
        raise BadField("SHARE", f"{text[:40]!r} must read N% or a number, such as 1% or 0.01") from error
    if not 0 < share <= 1:
        raise BadField(
            "SHARE", f"is {text[:40]}; it must be above 0 and at most 100% ('muster capture off' ends it)"
        )
    return share


@change_command()
def off(*, name: EndpointName) -> ChangeRequest:
    """End the capture of an endpoint's requests, and wait until no proxy captures any.

    Example:
      muster capture off hello

    What was captured stays until its time is over.
    """
    tag = deployment_tag(name)
    return ChangeRequest(
        command=SetCapture(endpoint=tag, share=0),
        what=f"capture of {short_name(tag)}",
        done="is off",
        already="is off already",
        progress_command="muster capture list",
    )


@query_command
def list_captures() -> ReadRequest[list[CaptureView]]:
    """List the endpoints whose requests are captured."""
    return ReadRequest(GetCaptures(), _show_list)


def _show_list(views: Sequence[CaptureView]) -> None:
    rows = table("endpoint", "share", "bodies", "redacted")
    for view in views:
        config = view.capture
        names = [f"header {name}" for name in config.redact_headers]
        names += [f"query {name}" for name in config.redact_query]
        rows.add_row(
            Cell(short_name(view.endpoint_tag)),
            Cell(f"{config.share * 100:g}%"),
            Cell("yes" if config.bodies else "no"),
            Cell(", ".join([*config.redact, *names]) or "-"),
        )
    print_table("Captures", rows)


@stack_command
def show(
    session: Session,
    choice: StackChoice,
    *,
    name: EndpointName,
    limit: LimitOption = 20,
    as_json: bool = False,
) -> None:
    """Show captured requests of an endpoint with their responses, the oldest first.

    Examples:
      muster capture show hello
      muster capture show hello --limit 1000 --json

    They are read from NATS, which needs the permission for it: that of the role admin.
    """
    with session.reporting(as_json=as_json):
        tag = EndpointTag(deployment_tag(name))

        async def read(stack: Stack, _progress: Progress) -> list[CapturedPair]:
            assert stack.captures is not None
            return await stack.captures(tag).read(limit)

        pairs = session.run(session.find_stack(choice), "show captured requests", read)
        if as_json:
            print_json(pairs)
        else:
            _show_pairs(pairs)


def _show_pairs(pairs: Sequence[CapturedPair]) -> None:
    rows = table("at", "request", "body", "status", "response", "ms")
    for pair in pairs:
        query = f"?{pair.query}" if pair.query else ""
        rows.add_row(
            Cell(format_time(pair.at)),
            Cell(f"{pair.method} {pair.path}{query}"),
            Cell(_describe(pair.request)),
            Cell(str(pair.status), style="red" if pair.status >= 500 else ""),
            Cell(_describe(pair.response)),
            Cell(f"{pair.duration_ms:.1f}"),
        )
    print_table("Captured requests", rows)


def _describe(message: CapturedMessage) -> str:
    if message.state is not BodyState.CAPTURED:
        return f"{message.body_bytes} bytes, {message.state.value}" if message.body_bytes else "-"
    try:
        text = message.body.decode()
    except UnicodeDecodeError:
        text = f"{len(message.body)} bytes"
    if not text.isprintable():
        text = json.dumps(text)
    return text if len(text) <= _BODY_LENGTH_MAX else f"{text[: _BODY_LENGTH_MAX - 1]}…"


app.command("set")(set_)
app.command("off")(off)
app.command("list")(list_captures)
app.command("show")(show)
