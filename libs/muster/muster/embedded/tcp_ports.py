"""Choosing the ports of a stack: those that were asked for or used before, as far as they are free.

Why before anything starts: a taken port is then told by its number instead of by some process' log. From then on they
are held (`ChosenPorts.holders`), or the system would give them to whoever asks for any port before our process listens:
a stack that starts opens hundreds of connections, and so may others on the machine.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping

import msgspec

from muster.embedded.errors import PortTaken
from muster.embedded.options import StackOptions

LOOPBACK = "127.0.0.1"


class ChosenPorts(msgspec.Struct, frozen=True):
    """The ports by use, and what to tell the user about the choice."""

    by_use: dict[str, int]
    notices: list[str]
    holders: list[socket.socket]
    """Bound and never listening: while they are open nobody else gets the ports, but servers, which set SO_REUSEADDR.

    To be closed when the ports are needed no more.
    """


def choose_ports(options: StackOptions, used_before: Mapping[str, int]) -> ChosenPorts:
    """Ports for one run of the stack, all different.

    Raises `PortTaken` when something else listens on the HTTP port.
    """
    wanted = {
        "nats": options.nats_port,
        "controller_ops": options.controller_ops_port,
        "proxy_ops": options.proxy_ops_port,
        "host_ops": options.host_ops_port,
        # Known to the stack alone, so any will do.
        "nats_monitor": 0,
        "postgres": 0,
    }
    by_use: dict[str, int] = {}
    holders: list[socket.socket] = []
    notices = []
    http_wanted = options.http_port or used_before.get("http", 0)
    if options.http_port and not is_free(options.http_port, options.http_host):
        raise PortTaken(
            f"port {options.http_port} of {options.http_host} is taken by another program; stop that one, or choose "
            "another HTTP port"
        )
    holders.append(_first_free([http_wanted], by_use, options.http_host))
    by_use["http"] = holders[-1].getsockname()[1]
    for use, port in wanted.items():
        holders.append(_first_free([port, used_before.get(use, 0)], by_use, LOOPBACK))
        by_use[use] = holders[-1].getsockname()[1]
        if port not in (0, by_use[use]):
            notices.append(f"port {port} is taken, so {_NAMES[use]} listens on {by_use[use]}")
    return ChosenPorts(by_use, notices, holders)


_NAMES = {
    "nats": "NATS",
    "controller_ops": "the controller's operations port",
    "proxy_ops": "the proxy's operations port",
    "host_ops": "the replica host's operations port",
}


def is_free(port: int, host: str = LOOPBACK) -> bool:
    """Whether a server could listen there now."""
    try:
        with _bound(host, port) as probe:
            probe.listen(1)
    except OSError:
        return False
    return True


def _first_free(candidates: list[int], chosen: Mapping[str, int], host: str) -> socket.socket:
    """A socket that is bound to the first of them that is free, or to any other port."""
    for port in candidates:
        if port and port not in chosen.values() and is_free(port, host):
            return _bound(host, port)
    while True:
        found = _bound(host, 0)
        if found.getsockname()[1] not in chosen.values():
            return found
        found.close()


def _bound(host: str, port: int) -> socket.socket:
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        # As servers do; without it the port of a stack that has just ended would seem taken.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except OSError:
        bound.close()
        raise
    return bound
