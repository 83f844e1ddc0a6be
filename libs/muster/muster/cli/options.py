"""Options that several commands share, spelled once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_STACK = "Which stack"

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
NatsOption = Annotated[
    str | None,
    typer.Option(
        "--nats",
        metavar="URL",
        help="nats://user:password@host:port (or MUSTER_NATS_URL).",
        rich_help_panel=_STACK,
    ),
]
CredsOption = Annotated[
    Path | None,
    typer.Option(
        "--creds",
        metavar="FILE",
        help="NATS credentials file, such as secrets/admin.creds (or MUSTER_NATS_CREDS).",
        rich_help_panel=_STACK,
    ),
]
UserOption = Annotated[
    str | None,
    typer.Option(
        "--user",
        metavar="USER",
        help="User of a NATS with plain users, admin unless given (or MUSTER_NATS_USER).",
        rich_help_panel=_STACK,
    ),
]
PasswordFileOption = Annotated[
    Path | None,
    typer.Option(
        "--password-file",
        metavar="FILE",
        help="File with its password (or MUSTER_NATS_PASSWORD_FILE, MUSTER_NATS_PASSWORD).",
        rich_help_panel=_STACK,
    ),
]
TimeoutOption = Annotated[
    float, typer.Option("--timeout-s", min=0.0, max=86_400.0, help="How long to wait, in seconds.")
]
NoWaitOption = Annotated[
    bool, typer.Option("--no-wait", help="Return when the change is recorded, not when it is done.")
]
DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Show what would happen to which replicas, and change nothing.")
]
