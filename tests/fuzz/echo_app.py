"""What answers fuzzed requests: it notes each whole one, and sends its body back. The same code in every server."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from tests.fuzz.pipelines import Message, is_ours, path_of

Seen = defaultdict[int, list[Message]]
_OURS = re.compile(r"/echo/p(\d+)-")


def make_app(seen: Seen) -> Callable[..., Any]:
    """An ASGI application that notes requests by the number of their pipeline."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await receive()
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await send({"type": "lifespan.shutdown.complete"})
            return
        if scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close"})
            return
        pieces: list[bytes] = []
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            pieces.append(message.get("body", b""))
            if not message.get("more_body"):
                break
        body, path = b"".join(pieces), path_of(scope["raw_path"])
        found = _OURS.match(path)
        if found is not None and is_ours(path, int(found[1])):
            seen[int(found[1])].append(Message(scope["method"], path, body))
        headers = [(b"content-length", b"%d" % len(body))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    return app


SEEN: Seen = defaultdict(list)
"""By the replica."""
app = make_app(SEEN)
