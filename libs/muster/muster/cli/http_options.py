"""`muster http …`: what all proxies apply to every request, changed while they run."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import typer

from muster.cli.asking import Question, asking
from muster.cli.changing import changing
from muster.cli.config_options import named_by_option
from muster.cli.group import group
from muster.cli.intent import Intent
from muster.cli.session import Session
from muster.cli.tables import print_facts, value_text
from serve_common.errors import BadField
from serve_common.values import HttpOptions, check_http_options, merged
from serve_common.wires.commands import SetHttpOptions

app = group("What all proxies apply to every request: show, set.")


@asking
def show(session: Session) -> Question[HttpOptions]:  # noqa: ARG001 - every command gets it
    """Show the options of all proxies."""
    return Question(lambda admin: admin.get_http_config(), _show)


@changing()
def set_(
    session: Session,  # noqa: ARG001 - every command gets it
    *,
    request_timeout_s: Annotated[
        float | None, typer.Option("--request-timeout-s", help="From a request's arrival to its answer.")
    ] = None,
    body_bytes_max: Annotated[
        int | None, typer.Option("--body-bytes-max", help="Larger bodies are refused.")
    ] = None,
    middlewares: Annotated[
        list[str] | None,
        typer.Option(
            "--middlewares",
            metavar="MODULE:ATTRIBUTE",
            help="May be given again, the outermost first; '' alone is none.",
        ),
    ] = None,
) -> Intent:
    """Change options of all proxies while they run.

    Example:
      muster http set --request-timeout-s 30

    What is not given stays as it is.
    """
    partial: dict[str, Any] = {}
    if request_timeout_s is not None:
        partial["request_timeout_s"] = request_timeout_s
    if body_bytes_max is not None:
        partial["body_bytes_max"] = body_bytes_max
    if middlewares:
        partial["middlewares"] = [] if middlewares == [""] else middlewares
    if not partial:
        raise BadField("options", "nothing is given; --help shows them")
    try:
        check_http_options(merged(HttpOptions(), partial, "options"))
    except BadField as error:
        raise named_by_option(error, "options") from error
    return Intent(
        command=SetHttpOptions(options=partial),
        what="options of all proxies",
        done="are changed",
        already="are already as given",
        look="muster http show",
    )


def _show(options: HttpOptions) -> None:
    print_facts({name: value_text(value) for name, value in msgspec.structs.asdict(options).items()})


app.command("show")(show)
app.command("set")(set_)
