"""``python -m bench.uploads``: more uploads at once than one proxy has memory for, again and again.

What becomes of them, and of the proxy's memory: 300 of 5 MiB. How soon they are answered says something on a quiet
machine only; `tests/integration/test_leaks.py` runs one round, with a bound that grows with what else runs.

Why the clients are a process of their own, without asyncio: what is measured is how soon a proxy answers, and a client
that is slower than it would measure itself. Every client sends from the same buffer, and nothing is done in between.
"""

from __future__ import annotations

import argparse
import asyncio
import errno
import select
import socket
import sys
import tempfile
import time
from pathlib import Path

import msgspec
import psutil

from tests.support.stacks.bare_stack import BareStack, Runner

MIB = 1024 * 1024
UPLOADS = 300
UPLOAD_BYTES = 5 * MIB
RSS_BYTES_MAX = 200 * MIB
"""Of the proxy, while they come."""
RETAINED_BYTES_MAX = 24 * MIB
"""Above what the proxy had before, once the memory was given back."""
GIVEN_BACK_WITHIN_S = 60.0

APP = """
from starlette.requests import Request

async def sink(request: Request) -> bytes:
    size = 0
    async for piece in request.stream():
        size += len(piece)
    return b"%d" % size
"""

KINDS = ("eager", "chunked", "expects", "patient")
"""How they send, in turns: with a length; in chunks; the body only after 100 Continue; and with a length, but reading
nothing before everything was sent, as many clients do."""
GIVES_UP_AFTER_S = 180.0
_SENT_AT_ONCE_BYTES = 256 * 1024
_CHUNK = b"%x\r\n" % _SENT_AT_ONCE_BYTES + bytes(_SENT_AT_ONCE_BYTES) + b"\r\n"


class Upload(msgspec.Struct):
    """One of them."""

    kind: str
    status: int = 0
    """0 when no answer came."""
    says_when: bool = False
    """It has ``Retry-After``."""
    error: str = ""
    """What ended the connection before the whole answer was read."""
    sent_bytes: int = 0
    answered_after_s: float = 0.0
    """From its head's being sent until the first byte of the answer is there to be read, or its end without one."""
    read_after_s: float = 0.0
    """Until the whole answer was read."""

    @property
    def is_well(self) -> bool:
        """It was taken, or refused as it should be, and the whole answer was read."""
        return not self.error and (self.status, self.says_when) in {(200, False), (503, True)}


class _Client:
    def __init__(self, number: int, address: tuple[str, int], path: str, size: int) -> None:
        self.upload = Upload(KINDS[number % len(KINDS)])
        self.socket = socket.socket()
        self.socket.setblocking(False)
        self.socket.connect_ex(address)
        kind = self.upload.kind
        lines = f"POST {path} HTTP/1.1\r\nHost: h\r\n"
        lines += "Transfer-Encoding: chunked\r\n" if kind == "chunked" else f"Content-Length: {size}\r\n"
        lines += "Expect: 100-continue\r\n\r\n" if kind == "expects" else "\r\n"
        if kind == "chunked":
            count, rest = divmod(size, _SENT_AT_ONCE_BYTES)
            assert not rest, "it is a whole number of chunks"
            self.parts = [memoryview(_CHUNK)] * count + [memoryview(b"0\r\n\r\n")]
        else:
            body = memoryview(_CHUNK)[:_SENT_AT_ONCE_BYTES]
            self.parts = [body] * (size // len(body)) + [body[: size % len(body)]]
        self.head = lines.encode()
        self.parts.reverse()
        self.began = 0.0
        self.may_send = kind != "expects"
        self.came = b""

    @property
    def wants(self) -> int:
        """What it waits for."""
        if not self.began:
            return select.EPOLLOUT
        sends = self.may_send and bool(self.parts)
        hears = self.reads or not self.upload.answered_after_s
        return (select.EPOLLOUT if sends else 0) | (select.EPOLLIN if hears else 0)

    @property
    def reads(self) -> bool:
        """False while it would not look at an answer."""
        return self.upload.kind != "patient" or not self.parts

    def send(self) -> None:
        if not self.began:
            self.began = time.monotonic()
            self.socket.send(self.head)
            return
        part = self.parts.pop()
        sent = self.socket.send(part) if part else 0
        self.upload.sent_bytes += sent
        if sent < len(part):
            self.parts.append(part[sent:])

    def read(self) -> bool:
        """True when the answer is whole."""
        if not self.came and not self.upload.answered_after_s:
            self.upload.answered_after_s = time.monotonic() - self.began
        if not self.reads:
            return False
        data = self.socket.recv(65536)
        if not data:
            raise EOFError
        self.came += data
        head, _, body = self.came.partition(b"\r\n\r\n")
        if head.startswith(b"HTTP/1.1 100"):
            self.came, self.may_send = body, True
            self.upload.answered_after_s = 0.0
            return False
        lines = head.lower().split(b"\r\n")
        lengths = [int(line[15:]) for line in lines if line.startswith(b"content-length:")]
        if not lengths or len(body) < lengths[0]:
            return False
        self.upload.read_after_s = time.monotonic() - self.began
        self.upload.status = int(head.split()[1])
        self.upload.says_when = any(line.startswith(b"retry-after:") for line in lines)
        return True


def run(host: str, port: int, path: str, count: int, size: int) -> list[Upload]:
    """All of them, begun at once."""
    clients = [_Client(number, (host, port), path, size) for number in range(count)]
    with select.epoll() as poll:
        left = {client.socket.fileno(): client for client in clients}
        for number, client in left.items():
            poll.register(number, client.wants)
        give_up_at = time.monotonic() + GIVES_UP_AFTER_S
        while left and time.monotonic() < give_up_at:
            for number, events in poll.poll(1.0):
                client = left[number]
                is_done = False
                try:
                    if events & ~select.EPOLLOUT and client.wants & select.EPOLLIN:
                        is_done = client.read()
                    if not is_done and events & select.EPOLLOUT and client.wants & select.EPOLLOUT:
                        client.send()
                    elif events & select.EPOLLERR and not client.wants & select.EPOLLIN:
                        client.send()  # which says what is wrong
                except BlockingIOError:
                    pass
                except (OSError, EOFError) as error:
                    client.upload.error = _name(error)
                    client.upload.answered_after_s = time.monotonic() - client.began
                    is_done = True
                if is_done:
                    poll.unregister(number)
                    left.pop(number).socket.close()
                else:
                    poll.modify(number, client.wants)
        for client in left.values():
            client.upload.error = "no answer"
    return [client.upload for client in clients]


def _name(error: Exception) -> str:
    return errno.errorcode.get(error.errno or 0, "") if isinstance(error, OSError) else "closed"


class Burst(msgspec.Struct):
    """What became of so many uploads that came at once, and of their proxy."""

    uploads: list[Upload]
    before_bytes: int
    most_bytes: int
    """What the proxy had in memory."""
    given_back_after_s: float

    @property
    def refused(self) -> list[Upload]:
        """Those that found no room."""
        return [upload for upload in self.uploads if upload.status == 503]

    @property
    def text(self) -> str:
        """It in lines."""
        before, most, after = self.before_bytes // MIB, self.most_bytes // MIB, self.given_back_after_s
        lines = [f"{before} MiB before, {most} at most, given back after {after:.1f} s"]
        groups: dict[tuple[str, int, str], list[Upload]] = {}
        for upload in self.uploads:
            key = (upload.kind, upload.status, upload.error)
            groups.setdefault(key, []).append(upload)
        for (kind, status, error), group in sorted(groups.items()):
            answered = [upload.answered_after_s for upload in group]
            read = [upload.read_after_s for upload in group]
            lines.append(
                f"{kind:8} {status} {error or 'whole'}: {len(group):3}, answered after {min(answered):.2f}"
                f" to {max(answered):.2f} s, read after {min(read):.2f} to {max(read):.2f} s"
            )
        return "\n".join(lines)


async def add_sink(stack: BareStack, directory: Path) -> Runner:
    """A proxy, and two replicas that read what is uploaded to ``/sink``."""
    (directory / "sink_app.py").write_text(APP)
    (proxy,) = await stack.add_proxies(1, request_timeout_s=120.0)
    tags = ["d/sink#0", "d/sink#1"]
    for tag in tags:
        await stack.add_replica(tag, "sink_app:sink", app_dir=str(directory))
    await stack.put_endpoint("d/sink", "/sink")
    await stack.put_backend("d/sink", tags)
    return proxy


async def upload_too_much(proxy: Runner) -> Burst:
    """All of them at once; returns when the memory was given back, or `GIVEN_BACK_WITHIN_S` is over."""
    process = psutil.Process(proxy.process.pid)
    before_bytes = most_bytes = process.memory_info().rss
    uploading = asyncio.gather(upload_at_once(proxy, UPLOADS))
    while not uploading.done():
        most_bytes = max(most_bytes, process.memory_info().rss)
        await asyncio.sleep(0.02)
    ended = time.monotonic()
    while process.memory_info().rss > before_bytes + RETAINED_BYTES_MAX:
        if time.monotonic() > ended + GIVEN_BACK_WITHIN_S:
            break
        await asyncio.sleep(0.2)
    (uploads,) = await uploading
    return Burst(uploads, before_bytes, most_bytes, time.monotonic() - ended)


async def upload_at_once(proxy: Runner, count: int) -> list[Upload]:
    """They send from a process of their own, which is this module too."""
    host, port = proxy.url.removeprefix("http://").split(":")
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "bench.uploads", "--client", host, port, "/sink"),
        *(str(count), str(UPLOAD_BYTES)),
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    return msgspec.json.decode(output, type=list[Upload])


def violations(burst: Burst, answered_within_s: float) -> list[str]:
    """What is not as it must be."""
    found = [
        f"{upload.kind}: {upload.error or upload.status}" for upload in burst.uploads if not upload.is_well
    ]
    late = [upload for upload in burst.refused if upload.answered_after_s > answered_within_s]
    if late:
        found.append(f"{len(late)} were refused after more than {answered_within_s} s")
    if burst.most_bytes >= RSS_BYTES_MAX:
        found.append("the proxy has taken too much memory")
    if burst.given_back_after_s >= GIVEN_BACK_WITHIN_S:
        found.append("the memory was not given back")
    return found


async def measure(options: argparse.Namespace) -> bool:
    """Tell; True when all is as it must be."""
    is_well = True
    with tempfile.TemporaryDirectory(prefix="mu-", ignore_cleanup_errors=True) as text:
        async with BareStack.running(Path(text)) as stack:
            proxy = await add_sink(stack, Path(text))
            for number in range(options.rounds):
                burst = await upload_too_much(proxy)
                print(f"round {number + 1}: {burst.text}", flush=True)
                for violation in violations(burst, options.answered_within_s):
                    is_well = False
                    print(f"  NOT as it must be: {violation}", flush=True)
    return is_well


def main() -> int:
    """0: all was as it must be; 1: something was not."""
    parser = argparse.ArgumentParser(prog="python -m bench.uploads", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--answered-within-s", type=float, default=2.0, help="of those that are refused")
    parser.add_argument(
        "--client", nargs=5, metavar=("HOST", "PORT", "PATH", "COUNT", "BYTES"), help=argparse.SUPPRESS
    )
    options = parser.parse_args()
    if options.client:
        host, port, path, count, size = options.client
        print(msgspec.json.encode(run(host, int(port), path, int(count), int(size))).decode())
        return 0
    return 0 if asyncio.run(measure(options)) else 1


if __name__ == "__main__":
    sys.exit(main())
