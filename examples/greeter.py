"""A model for the canary: README.md has the commands."""

from __future__ import annotations

from starlette.requests import Request


class Greeter:
    """Greets in the words of its version."""

    def __init__(self, greeting: str) -> None:
        self.greeting = greeting
        self.num_calls = 0

    async def __call__(self, _request: Request) -> dict[str, object]:
        """The greeting, and how many calls this replica has had."""
        self.num_calls += 1
        return {"text": self.greeting, "calls": self.num_calls}
