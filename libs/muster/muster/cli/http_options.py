"""`muster http …`: what all proxies apply to every request, changed while they run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from muster.cli.asking import Question, asking
from muster.cli.changing import changing
from muster.cli.config_options import named_by_option
from muster.cli.group import group
from muster.cli.intent import Intent
from muster.cli.session import Session
from muster.cli.signature import option
from muster.cli.tables import print_facts, value_text
from serve_common.errors import BadField
from serve_common.values.http_options import HttpOptions, check_http_options
from serve_common.values.merging import merged
from serve_common.wires.commands import SetHttpOptions

app = group("What all proxies apply to every request: show, set.")


@asking
def show(session: Session) -> Question[HttpOptions]:  # noqa: ARG001 - every command gets it
    """Show the options of all proxies."""
    return Question(lambda admin: admin.get_http_config(), _show)


_FIELDS: Final = (
    ("request_timeout_s", float, "From a request's arrival to the beginning of its answer.", "S"),
    ("body_bytes_max", int, "Larger bodies are refused.", "N"),
    ("header_timeout_s", float, "Time for the head of a request.", "S"),
    ("body_rate_min", int, "Bytes a second that a client must send or take; 0 is any.", "N"),
    ("keep_alive_timeout_s", float, "How long a connection may be idle.", "S"),
    (
        "middlewares",
        list[str],
        "May be given again, the outermost first; '' alone is none.",
        "MODULE:ATTRIBUTE",
    ),
    ("access_log", bool, "A line of log for each request.", None),
)
"""Field by field: name, type, text, metavar."""
HTTP_CHANGES: Final = tuple(
    option(name, kind, text, metavar=metavar) for name, kind, text, metavar in _FIELDS
)


@changing(options=HTTP_CHANGES)
def set_(
    session: Session,  # noqa: ARG001 - every command gets it
    *,
    given: Mapping[str, Any],
) -> Intent:
    """Change options of all proxies while they run.

    Example:
      muster http set --request-timeout-s 30

    What is not given stays as it is.
    """
    partial = {name: value for name, value in given.items() if value != []}
    if partial.get("middlewares") == [""]:
        partial["middlewares"] = []
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
