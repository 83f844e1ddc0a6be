"""A chat room over WebSockets: what one says, all read.

python examples/websocket_chat.py
python -m websockets ws://127.0.0.1:8000/chat/ada
"""

from __future__ import annotations

from fastapi import FastAPI, WebSocket

import muster as serve

api = FastAPI(title="Chat")


# One replica: the room is in its memory. All callers of a WebSocket may stay for as long as they like.
@serve.deployment(num_replicas=1, max_ongoing_requests=100, ray_actor_options={"num_cpus": 0.1})
@serve.ingress(api)
class Room:
    """Those who are in the room."""

    def __init__(self) -> None:
        self.members: dict[str, WebSocket] = {}

    async def tell_all(self, text: str) -> None:
        """Send ``text`` to all members."""
        for member in list(self.members.values()):
            await member.send_text(text)

    @api.websocket("/{name}")
    async def join(self, socket: WebSocket, name: str) -> None:
        """Come in under a name that no one else has."""
        await socket.accept()
        if name in self.members:
            await socket.close(code=1008, reason=f"{name} is here already")
            return
        self.members[name] = socket
        try:
            await self.tell_all(f"{name} came in")
            async for text in socket.iter_text():
                await self.tell_all(f"{name}: {text}")
        finally:
            del self.members[name]
        await self.tell_all(f"{name} left")


app = Room.bind()

if __name__ == "__main__":
    serve.run(app, name="chat", route_prefix="/chat")
