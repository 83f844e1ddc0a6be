"""The other process of a floor: echoes requests. Run as ``python -m bench.floor_echo KIND NATS_PORT``.

Why a thread although the process does nothing else: a replica serves the bus from a thread of its own, beside the
main thread that belongs to Ray. Ray itself is left out, so that a floor is up at once.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import threading

import nats
import uvloop
from nats.aio.msg import Msg

from bench.bare_nats import BareResponder
from bench.floor_ingress import NATS_PY_SUBJECT, PROTOCOL_SUBJECT


async def echo_over_nats_py(nats_port: int) -> None:
    """Floor A's responder; echoes for ever."""
    client = await nats.connect(f"nats://127.0.0.1:{nats_port}", allow_reconnect=False)

    async def echo(message: Msg) -> None:
        await message.respond(message.data)

    await client.subscribe(NATS_PY_SUBJECT, cb=echo)
    await client.flush()
    await asyncio.Event().wait()


async def echo_over_protocol(nats_port: int) -> None:
    """Floor B's responder; echoes for ever."""
    loop = asyncio.get_running_loop()
    _, responder = await loop.create_connection(
        lambda: BareResponder(PROTOCOL_SUBJECT.encode()), "127.0.0.1", nats_port
    )
    await responder.is_connected
    await asyncio.Event().wait()


def main() -> None:
    """Read the arguments and echo until SIGTERM."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=["nats-py", "protocol"])
    parser.add_argument("nats_port", type=int)
    options = parser.parse_args()
    echo = {"nats-py": echo_over_nats_py, "protocol": echo_over_protocol}[options.kind]

    def run() -> None:
        try:
            uvloop.run(echo(options.nats_port))
        finally:
            os.kill(os.getpid(), signal.SIGTERM)  # a thread that failed must not leave an idle process

    threading.Thread(target=run, daemon=True, name="bus").start()
    signal.sigwait({signal.SIGTERM})


if __name__ == "__main__":
    signal.pthread_sigmask(
        signal.SIG_BLOCK, {signal.SIGTERM}
    )  # before any thread exists, so that all inherit it
    main()
