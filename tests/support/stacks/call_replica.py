"""A replica for tests of plain NATS calls, which bear no path: the body of a call says what becomes of it."""

from __future__ import annotations

from serve_common.protocol.frames import ErrorHead
from tests.support.stacks.fake_replica import FakeReplica, Held
from tests.support.stacks.proxy_stack import R0, Stack

BIG_BYTES = 3 * 1024 * 1024


class CallReplica(FakeReplica):
    """``hold`` waits to be released, ``raise`` fails, ``big`` is answered with 3 MiB; else it echoes."""

    def _work(self, held: Held) -> None:
        match bytes(held.body):
            case b"hold":
                return
            case b"raise":
                self.send(held, ErrorHead("user_code_raised", 500, "ValueError: not this", 0))
                self.held.pop(held.reply, None)
            case b"big":
                self._stream(held, [(b"content-type", b"text/big")], bytes(BIG_BYTES))
            case b"break":
                self._stream(held, [], bytes(BIG_BYTES))
                self.send(held, ErrorHead("user_code_raised", 500, "broke off", 0))
                self.held.pop(held.reply, None)
            case body:
                self._finish(held, body)


async def serve_calls(stack: Stack) -> CallReplica:
    """Everything up, with one such replica behind ``default/echo``."""
    replica = CallReplica(stack.server.url, R0)
    await replica.start()
    stack.replicas.append(replica)
    await stack.serve()
    await stack.applied(await stack.put_backend(R0))
    return replica
