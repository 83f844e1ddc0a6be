"""`muster secrets`: the passwords that compose needs, made once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from muster import secrets as stack_secrets
from muster.cli import output
from muster.cli.options import JsonOption
from muster.cli.session import session_of


def secrets(
    context: typer.Context,
    *,
    directory: Annotated[
        Path, typer.Option("--directory", metavar="DIR", help="Where; made when it is not there.")
    ] = Path("secrets"),
    as_json: JsonOption = False,
) -> None:
    """Generate the passwords of a stack in containers, each in a file of its own.

    Example:
      muster secrets --directory secrets

    Those that are there are kept. Values are never printed.
    """
    session = session_of(context)
    with session.reporting(as_json=as_json):
        place = session.directory / directory
        before = _files(place)
        stack_secrets.generate(place, for_containers=True)
        after = _files(place)
        made, kept = sorted(after - before), sorted(after & before)
        if as_json:
            output.print_json({"directory": str(place), "made": made, "kept": kept})
            return
        for name in made:
            output.say(f"made {directory / name}")
        if not made:
            output.say(f"nothing to do: {directory} has all {len(kept)} files")
        elif kept:
            output.say(f"kept {len(kept)} others")


def _files(place: Path) -> set[str]:
    expected = {*stack_secrets.NAMES, stack_secrets.NATS_INCLUDE}
    return {name for name in expected if (place / name).exists()}
