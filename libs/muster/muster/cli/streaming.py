"""Commands that go on until Ctrl-C: they find the stack and report as those do that only look."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import typer

from muster.cli.session import session_of
from muster.cli.signature import STACK_OPTIONS, composed, stack_choice

Run = Callable[..., Coroutine[Any, Any, None]]
"""``(session, address, *, as_json, …)``"""


def streaming(run: Run) -> Callable[..., None]:
    """Make a command of an async function; its own parameters are those that are annotated for typer.

    Ctrl-C is how it ends, and no failure.
    """

    def command(context: typer.Context, values: dict[str, Any]) -> None:
        session = session_of(context)
        choice = stack_choice(values)
        with session.reporting(as_json=values["as_json"]):
            address = session.find_stack(choice)
            try:
                asyncio.run(run(session, address, **values))
            except KeyboardInterrupt:
                return

    return composed(run, command, STACK_OPTIONS)
