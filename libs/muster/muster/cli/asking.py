"""Commands that only look: each says what to ask and how to show it, and all find the stack and report alike."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

import msgspec
import typer

from muster.cli import output
from muster.cli.ports import AdminPort
from muster.cli.session import Session, session_of
from muster.cli.signature import STACK_OPTIONS, composed, stack_choice
from muster.client.address import StackAddress

_RETRY_S = 15.0
Answer = TypeVar("Answer")


class Question(msgspec.Struct, Generic[Answer], frozen=True):
    """What to ask, and how its answer looks to a person."""

    ask: Callable[[AdminPort], Awaitable[Answer]]
    show: Callable[[Answer], None]


def asking(build: Callable[..., Question[Any]]) -> Callable[..., None]:
    """Make a command of a function that turns ``(session, *, arguments)`` into a `Question`."""

    def run(context: typer.Context, values: dict[str, Any]) -> None:
        session = session_of(context)
        as_json = values.pop("as_json")
        choice = stack_choice(values)
        with session.reporting(as_json=as_json):
            question = build(session, **values)
            answer = asyncio.run(_ask(session, session.find_stack(choice), question, build.__name__))
            if as_json:
                output.print_json(answer)
            else:
                question.show(answer)

    return composed(build, run, STACK_OPTIONS)


async def _ask(session: Session, address: StackAddress, question: Question[Answer], title: str) -> Answer:
    with output.Progress(title.replace("_", " ").strip()) as progress:
        async with session.connect(address, progress, retry_for_s=_RETRY_S) as stack:
            return await question.ask(stack.admin)
