"""How requests come in, as callers see it: endpoints, and the options of all proxies."""

from __future__ import annotations

from serve_common.values.http_options import HttpOptions
from serve_common.wires.queries import PagedQuery
from serve_common.wires.views import EndpointView
from serve_controller.core.checkpoint import Checkpoint
from serve_controller.core.objects import Endpoint
from serve_controller.core.views.paging import ALL, page_of


def view_endpoints(checkpoint: Checkpoint, query: PagedQuery = ALL) -> list[EndpointView]:
    """All endpoints in the order of their tags."""
    return [_endpoint(checkpoint.endpoints[tag]) for tag in page_of(checkpoint.endpoints.keys(), query)]


def _endpoint(endpoint: Endpoint) -> EndpointView:
    target = endpoint.target
    return EndpointView(
        endpoint_tag=endpoint.endpoint_tag,
        route=target.route,
        methods=target.methods,
        traffic={str(tag): weight for tag, weight in sorted(target.traffic.items())},
        shadows={str(tag): proportion for tag, proportion in sorted(target.shadows.items())},
        options=target.options,
    )


def view_http_config(checkpoint: Checkpoint) -> HttpOptions:
    """What proxies are told to apply; the defaults while nobody changed them."""
    return HttpOptions() if checkpoint.http is None else checkpoint.http.target
