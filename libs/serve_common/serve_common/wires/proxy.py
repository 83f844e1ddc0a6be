"""What a proxy tells the controller.

Why it matters: a goal that changes routing succeeds only when every live proxy has applied the snapshot.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from serve_common.names import ProxyId
from serve_common.wires.bounds import Address, Count, Label, Moment, Text


class ProxyReport(msgspec.Struct, frozen=True, kw_only=True):
    """One proxy's state, sent about every second and at once on change."""

    proxy_id: Annotated[ProxyId, Meta(max_length=256)]
    sequence: Count
    """Rises within a life of the process."""
    started_at: Moment
    """When this life began, seconds since 1970."""
    applied_snapshot_id: Count
    """Every snapshot up to this id is applied; 0 before the bucket was read."""
    incarnation: Label = ""
    """As in `HostReport`; empty of a proxy of an earlier version."""
    address: Address = ""
    """Where it listens, as host:port."""
    http_error: Text = ""
    """Why the newest `HttpSnapshot` is not in force (a middleware cannot be imported); empty when it is."""
    http_error_snapshot_id: Count = 0
    """Of that snapshot; 0 for none."""
    metrics_url: Address = ""
    """Where the controller scrapes it when there is no Prometheus, such as ``http://10.0.0.7:9102/metrics``; proxies
    that share a port tell the same. Empty: it cannot be scraped."""
    leaving: bool = False
    """It drains and takes no new requests; goals no longer wait for it."""


class LeaderNotice(msgspec.Struct, frozen=True, kw_only=True):
    """Published by a controller that begins to lead."""

    controller_id: Label
    epoch: Count
