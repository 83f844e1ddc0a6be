"""Where this process' page of metrics is for others, which it tells the controller.

Why not by a name: containers of a scaled service share one, and each of them must be scraped by itself.
"""

from __future__ import annotations

from typing import Final

from nats.aio.client import Client

from serve_common.settings import OperationsSettings

_WILDCARDS: Final = frozenset({"", "*", "0.0.0.0", "::", "0:0:0:0:0:0:0:0"})  # noqa: S104 - compared with, not bound


def metrics_url(settings: OperationsSettings, port: int, local_host: str | None) -> str:
    """The URL of the page; empty while the address is not known.

    Its host is what was configured, else the address that is bound to, else ``local_host``: this side's address of
    a connection to NATS, on which the controller is found too. ``port`` is the one really listened on.
    """
    host, advertised_port = split_advertised(settings.advertise)
    if not host:
        host = settings.host if _is_one_address(settings.host) else local_host or ""
    if not host:
        return ""
    return f"http://{f'[{host}]' if ':' in host else host}:{advertised_port or port}/metrics"


def advertised_for_children(settings: OperationsSettings, port: int) -> str:
    """What children of this process must be told, so that they tell of its page instead of their own."""
    host, advertised_port = split_advertised(settings.advertise)
    if not host and _is_one_address(settings.host):
        host = settings.host
    return f"{f'[{host}]' if ':' in host else host}:{advertised_port or port}"


def _is_one_address(host: str) -> bool:
    return host not in _WILDCARDS and "," not in host


def split_advertised(text: str) -> tuple[str, int | None]:
    """Host and port of ``host``, ``host:port``, ``:port``, or of an IPv6 address, in brackets where a port follows."""
    if text.startswith("["):
        host, _, port = text[1:].partition("]")
        return host, int(port[1:]) if port else None
    host, colon, port = text.rpartition(":")
    if not colon or ":" in host:
        return text, None
    return host, int(port) if port else None


def local_host_of(client: Client | None) -> str | None:
    """This side's address of the connection; None while there is none."""
    if client is None or not client.is_connected:
        return None
    # The library has no way to it.
    writer = getattr(client._transport, "_io_writer", None)  # noqa: SLF001 - see above
    name = None if writer is None else writer.get_extra_info("sockname")
    return str(name[0]) if isinstance(name, tuple) and name else None
