"""`muster secrets`: the identities and passwords that compose needs, made once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from muster import secrets as stack_secrets
from muster.cli import output
from muster.cli.options import JsonOption
from muster.cli.session import session_of
from serve_common.errors import BadField
from serve_common.identities.roles import Role


def secrets(
    context: typer.Context,
    *,
    directory: Annotated[
        Path, typer.Option("--directory", metavar="DIR", help="Where; made when it is not there.")
    ] = Path("secrets"),
    rotate: Annotated[
        Role | None,
        typer.Option(
            "--rotate",
            metavar="ROLE",
            help="Replace the keys of this role: controller, host, admin, proxy, replica, client or system.",
        ),
    ] = None,
    subject_prefix: Annotated[
        str,
        typer.Option(
            "--subject-prefix", metavar="NAME", help="First token of all subjects of this instance."
        ),
    ] = "serve",
    plain: Annotated[
        bool,
        typer.Option("--plain", help="Make passwords for a NATS with plain users instead of identities."),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Generate the NATS identities and passwords of a stack in containers.

    Example:
      muster secrets --directory secrets

    Files that are there are kept. Secrets are never printed. When
    nats_identities.conf has changed, restart NATS; after --rotate, restart the
    processes of that role too.
    """
    session = session_of(context)
    with session.reporting(as_json=as_json):
        if rotate is not None and plain:
            raise BadField("--rotate", "plain users have passwords: remove their files and generate again")
        place = session.directory / directory
        before = _files(place)
        stack_secrets.generate(
            place, for_containers=True, plain=plain, subject_prefix=subject_prefix, rotate=rotate
        )
        after = _files(place)
        made = sorted(after.keys() - before.keys())
        changed = sorted(name for name in after.keys() & before.keys() if after[name] != before[name])
        kept = sorted(name for name in after.keys() & before.keys() if after[name] == before[name])
        if as_json:
            output.print_json({"directory": str(place), "made": made, "changed": changed, "kept": kept})
            return
        for word, names in (("made", made), ("changed", changed)):
            for name in names:
                output.say(f"{word} {directory / name}")
        if not made and not changed:
            output.say(f"nothing to do: {directory} has all {len(kept)} files")
        elif kept:
            output.say(f"kept {len(kept)} others")


def _files(place: Path) -> dict[str, tuple[int, int]]:
    """What tells whether a file was written meanwhile."""
    expected = {*stack_secrets.FILES, *stack_secrets.PLAIN_NAMES, stack_secrets.NATS_INCLUDE}
    found = {}
    for name in expected:
        path = place / name
        if path.exists():
            stat = path.stat()
            found[name] = stat.st_ino, stat.st_mtime_ns
    return found
