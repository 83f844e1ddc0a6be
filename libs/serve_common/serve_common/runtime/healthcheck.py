"""``python -m serve_common.runtime.healthcheck URL``: exits with 0 when the URL answers 200, or says why not.

Why: the images hold neither curl nor wget, and a container's health check runs every few seconds, so it must start
fast. It speaks just enough HTTP for an operations port and imports next to nothing.
"""

from __future__ import annotations

import socket
import sys
from typing import Final

_TIMEOUT_S: Final = 2.0
_ANSWER_BYTES_MAX: Final = 4096


def why_unhealthy(url: str) -> str | None:
    """None when ``url`` (``http://host:port/path``) answers 200; otherwise one line with the reason."""
    address, _, path = url.removeprefix("http://").partition("/")
    host, _, port = address.partition(":")
    request = f"GET /{path} HTTP/1.0\r\nHost: {address}\r\n\r\n".encode()
    answer = b""
    try:
        with socket.create_connection((host, int(port or "80")), _TIMEOUT_S) as connection:
            connection.sendall(request)
            while len(answer) < _ANSWER_BYTES_MAX and (part := connection.recv(_ANSWER_BYTES_MAX)):
                answer += part
    except (OSError, ValueError) as error:
        return f"{url}: {error}"
    head, _, body = answer.partition(b"\r\n\r\n")
    words = head.split(b" ", 2)
    if len(words) > 1 and words[1] == b"200":
        return None
    return f"{url}: {(body or head).decode(errors='replace').strip()[:200] or 'no answer'}"


def main() -> int:
    """The exit code; the reason goes to the standard output, where the engine keeps it."""
    reason = why_unhealthy(sys.argv[1])
    if reason is not None:
        print(reason)  # noqa: T201 - a command's answer
    return 0 if reason is None else 1


if __name__ == "__main__":
    sys.exit(main())
