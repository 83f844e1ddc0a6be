"""`muster traffic …`: how an endpoint's requests are divided among backends."""

from __future__ import annotations

from typing import Annotated

import typer

from muster.cli import output, values_given
from muster.cli.changing import changing
from muster.cli.endpoint import Name, Weights
from muster.cli.group import group
from muster.cli.intent import Intent
from muster.cli.session import Session
from serve_common.names import deployment_tag
from serve_common.wires.commands import SetTraffic, ShadowTraffic

app = group("Which backends get an endpoint's requests: set, shadow.")


@changing()
def set_(
    session: Session,  # noqa: ARG001 - every command gets it
    *,
    name: Name,
    weights: Weights,
) -> Intent:
    """Divide an endpoint's requests, and wait until every proxy does so.

    Examples:
      muster traffic set digits v1=0.9 v2=0.1
      muster traffic set digits v2

    All weights are given anew; those left out get none.
    """
    tag = deployment_tag(name, "ENDPOINT")
    read = values_given.read_shares(weights, "BACKEND=WEIGHT")
    return Intent(
        command=SetTraffic(endpoint=tag, weights=read),
        what=f"traffic of {output.short_name(tag)}",
        done="is set",
        look="muster endpoint list",
    )


@changing()
def shadow(
    session: Session,  # noqa: ARG001 - every command gets it
    *,
    name: Name,
    backend: Annotated[str, typer.Argument(metavar="BACKEND", help="Gets copies; its answers are dropped.")],
    proportion: Annotated[
        float, typer.Argument(metavar="PROPORTION", help="Of the requests, 0 to 1; 0 ends it.")
    ],
) -> Intent:
    """Copy some of an endpoint's requests to a backend on trial.

    Examples:
      muster traffic shadow digits v2 0.1
      muster traffic shadow digits v2 0

    Callers never notice: its answers and errors are dropped.
    """
    tag, copied_to = deployment_tag(name, "ENDPOINT"), deployment_tag(backend, "BACKEND")
    share = values_given.read_share(proportion, "PROPORTION")
    return Intent(
        command=ShadowTraffic(endpoint=tag, backend_tag=copied_to, proportion=share),
        what=f"shadow traffic of {output.short_name(tag)} to {output.short_name(copied_to)}",
        done="is set" if share else "is ended",
        look="muster endpoint list",
    )


app.command("set")(set_)
app.command("shadow")(shadow)
