"""Sub-commands such as `muster host list`: every group looks and helps alike."""

from __future__ import annotations

import typer

CONTEXT_SETTINGS = {"help_option_names": ["-h", "--help"]}


def group(text: str) -> typer.Typer:
    """A group without commands yet; alone it shows its help."""
    return typer.Typer(
        help=text, no_args_is_help=True, add_completion=False, context_settings=CONTEXT_SETTINGS
    )
