"""Never starts: shows how a failed deploy is reported, and that the version before it keeps serving."""

from __future__ import annotations

from starlette.requests import Request


class RaisesInConstructor:
    """Raises RuntimeError when a replica is made."""

    def __init__(self) -> None:
        raise RuntimeError("the model file is missing (raised on purpose by examples/failing)")

    async def __call__(self, request: Request) -> bytes:  # noqa: ARG002 - the signature of every deployment
        return b"never reached"
