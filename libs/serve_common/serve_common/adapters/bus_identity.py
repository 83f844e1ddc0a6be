"""Says whether this process has an identity of its own on the bus, or is a plain user as all others of its role.

Why loudly: with plain users everything works, and much of what keeps models apart is missing.
"""

from __future__ import annotations

import structlog

from serve_common.settings import BusSettings

_log = structlog.get_logger(__name__)

LOST = (
    "all processes of a role are one user of NATS: replicas can read and answer each other's requests, hosts and "
    "proxies can report for others, and JetStream can be made to speak for others; see SECURITY.md"
)
_has_identity = False


def declare_identity(settings: BusSettings) -> None:
    """At the start of a service, once: warn of a plain user, and let `has_identity` know."""
    global _has_identity  # noqa: PLW0603 - one for the process, as its metrics are
    _has_identity = not settings.is_plain
    if settings.is_plain:
        _log.warning("bus_has_plain_users", user=settings.user, lost=LOST)


def has_identity() -> bool:
    """As the service has declared."""
    return _has_identity
