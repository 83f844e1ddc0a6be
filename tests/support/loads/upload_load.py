"""Many uploads at once, from one process that does little else: when each was answered, with what, and how it ended.

Why not asyncio in the test's own process: what is measured is how soon a proxy answers, and a client that is slower
than it would measure itself. Here every client sends from the same buffer, and nothing is done in between.

Run as ``python -m tests.support.loads.upload_load HOST PORT PATH COUNT BYTES``; prints the list of `Upload` as JSON.
"""

from __future__ import annotations

import errno
import select
import socket
import sys
import time

import msgspec

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


if __name__ == "__main__":
    _host, _port, _path, _count, _size = sys.argv[1:]
    print(msgspec.json.encode(run(_host, int(_port), _path, int(_count), int(_size))).decode())
