"""Where a service says that it can be scraped."""

from __future__ import annotations

import pytest

from serve_common.errors import BadField
from serve_common.runtime.operations import advertised_for_children, metrics_url
from serve_common.runtime.settings import Environment, OperationsSettings, read_operations_settings


def settings(host: str = "0.0.0.0", advertise: str = "") -> OperationsSettings:
    return read_operations_settings(
        Environment({"MUSTER_OPS_HOST": host, "MUSTER_OPS_ADVERTISE": advertise}), 9102
    )


@pytest.mark.parametrize(
    ("host", "advertise", "local_host", "url"),
    [
        ("127.0.0.1", "", "10.0.0.7", "http://127.0.0.1:9/metrics"),
        ("0.0.0.0", "", "10.0.0.7", "http://10.0.0.7:9/metrics"),
        ("::", "", "fd00::7", "http://[fd00::7]:9/metrics"),
        ("0.0.0.0", "", None, ""),
        ("127.0.0.1,shared", "", "10.0.0.7", "http://10.0.0.7:9/metrics"),
        ("127.0.0.1", "node-3", None, "http://node-3:9/metrics"),
        ("127.0.0.1", "node-3:80", None, "http://node-3:80/metrics"),
        ("0.0.0.0", ":80", "10.0.0.7", "http://10.0.0.7:80/metrics"),
        ("127.0.0.1", "fd00::7", None, "http://[fd00::7]:9/metrics"),
        ("127.0.0.1", "[fd00::7]:80", None, "http://[fd00::7]:80/metrics"),
    ],
)
def test_the_url_is_what_was_configured_or_bound_or_what_nats_is_reached_from(
    host: str, advertise: str, local_host: str | None, url: str
) -> None:
    assert metrics_url(settings(host, advertise), 9, local_host) == url


@pytest.mark.parametrize(
    ("host", "advertise", "told"),
    [
        ("127.0.0.1", "", "127.0.0.1:9"),
        ("0.0.0.0", "", ":9"),
        ("0.0.0.0", "node-3", "node-3:9"),
        ("0.0.0.0", "[fd00::7]:80", "[fd00::7]:80"),
    ],
)
def test_children_tell_of_their_parents_page(host: str, advertise: str, told: str) -> None:
    assert advertised_for_children(settings(host, advertise), 9) == told
    child = settings("127.0.0.1", told)
    parent = settings(host, advertise)
    if told != ":9":
        assert metrics_url(child, 55_555, None) == metrics_url(parent, 9, None)
    assert metrics_url(child, 55_555, "10.0.0.7") in (
        metrics_url(parent, 9, "10.0.0.7"),
        "http://127.0.0.1:9/metrics",
    )


@pytest.mark.parametrize("text", ["http://x", "a b", "host:port", "host:70000", "[::1", "/x"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(BadField, match="MUSTER_OPS_ADVERTISE"):
        settings(advertise=text)
