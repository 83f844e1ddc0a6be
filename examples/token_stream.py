"""A server for the client `openai`: chat completions, whole or streamed token by token.

The generator is a toy that repeats what it was told; put your own in its place.

python examples/token_stream.py
curl -sN -H 'Content-Type: application/json' http://127.0.0.1:8000/llm/v1/chat/completions \\
    --data-binary '{"model": "parrot", "stream": true, "messages": [{"role": "user", "content": "to be or not to be"}]}'
"""

from __future__ import annotations

import asyncio
import json
import re
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any, Literal

from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, Field

import muster as serve

api = FastAPI(title="Chat completions")


def now() -> int:
    """Seconds since 1970."""
    return int(time.time())  # noqa: TID251 - the wall clock is what clients are told


class Message(BaseModel):
    """One turn of the conversation."""

    role: Literal["system", "user", "assistant"]
    content: str


class Completion(BaseModel):
    """A request as the client sends it; what is not named here is ignored."""

    model: str
    messages: list[Message] = Field(min_length=1)
    stream: bool = False
    max_tokens: int = Field(default=100, ge=1, le=4096)


@serve.deployment(max_ongoing_requests=32, ray_actor_options={"num_cpus": 0.1})
@serve.ingress(api)
class Chat:
    """Answers with the user's last words, in capitals."""

    async def tokens(self, request: Completion) -> AsyncIterator[str]:
        """The toy: one word at a time, as a model would."""
        for word in re.findall(r"\S+\s*", request.messages[-1].content)[: request.max_tokens]:
            await asyncio.sleep(0.01)
            yield word.upper()

    async def events(self, request: Completion) -> AsyncIterator[str]:
        """Server-sent events: a chunk for each token, one that says why it ends, and the end's mark."""
        head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": now(), "model": request.model}

        def event(delta: dict[str, str], reason: str | None) -> str:
            choice = {"index": 0, "delta": delta, "finish_reason": reason}
            return f"data: {json.dumps(head | {'object': 'chat.completion.chunk', 'choices': [choice]})}\n\n"

        yield event({"role": "assistant", "content": ""}, None)
        async for token in self.tokens(request):
            yield event({"content": token}, None)
        yield event({}, "stop")
        yield "data: [DONE]\n\n"

    @api.post("/v1/chat/completions", response_model=None)
    async def complete(self, request: Completion) -> StreamingResponse | dict[str, Any]:
        """A chat completion."""
        if request.stream:
            return StreamingResponse(self.events(request), media_type="text/event-stream")
        text = "".join([token async for token in self.tokens(request)])
        message = {"role": "assistant", "content": text}
        return {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "object": "chat.completion",
            "created": now(),
            "model": request.model,
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        }


app = Chat.bind()

if __name__ == "__main__":
    serve.run(app, name="llm", route_prefix="/llm")
