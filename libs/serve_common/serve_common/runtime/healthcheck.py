"""``python -m serve_common.runtime.healthcheck URL``: exits with 0 when the URL returns 200, or prints why not.

Why: the images hold neither curl nor wget, and a container's health check runs every few seconds, so it must start
fast. It implements just enough HTTP for an operations port and imports next to nothing.
"""

from __future__ import annotations

import socket
import sys
from typing import Final

_TIMEOUT_S: Final = 2.0
_RESPONSE_BYTES_MAX: Final = 4096


def check_url(url: str) -> str | None:
    """None when ``url`` (``http://host:port/path``) returns 200; otherwise one line with the reason."""
    address, _, path = url.removeprefix("http://").partition("/")
    host, _, port = address.partition(":")
    request = f"GET /{path} HTTP/1.0\r\nHost: {address}\r\n\r\n".encode()
    response = b""
    try:
        with socket.create_connection((host, int(port or "80")), _TIMEOUT_S) as connection:
            connection.sendall(request)
            while len(response) < _RESPONSE_BYTES_MAX and (part := connection.recv(_RESPONSE_BYTES_MAX)):
                response += part
    except (OSError, ValueError) as error:
        return f"{url}: {error}"
    head, _, body = response.partition(b"\r\n\r\n")
    tokens = head.split(b" ", 2)
    if len(tokens) > 1 and tokens[1] == b"200":
        return None
    return f"{url}: {(body or head).decode(errors='replace').strip()[:200] or 'no answer'}"


def main() -> int:
    """Return the exit code; the reason is printed to standard output, which the container engine keeps."""
    reason = check_url(sys.argv[1])
    if reason is not None:
        print(reason)  # noqa: T201 - a command's output
    return 0 if reason is None else 1


if __name__ == "__main__":
    sys.exit(main())
