"""Takes what is sent to it over HTTP, and throws it away: a receiver of traces that costs next to nothing."""

from __future__ import annotations

import asyncio
import contextlib


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            length = int(head.partition(b"content-length:")[2].partition(b"\r\n")[0])
            await reader.readexactly(length)
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n")
    writer.close()


async def main() -> None:
    """Until it is terminated; says its URL first."""
    server = await asyncio.start_server(_serve, "127.0.0.1", 0, limit=2**20)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main())
