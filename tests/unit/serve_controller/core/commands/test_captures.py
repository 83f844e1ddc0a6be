"""Captures of an endpoint's requests: set, published, ended, and gone with their endpoint."""

from __future__ import annotations

import pytest

from serve_common.api.commands import DeleteEndpoint, SetCapture, SetTraffic
from serve_common.api.views import GoalStatus
from serve_common.config.capture import CaptureConfig
from serve_common.errors import BadField, NotFound
from serve_common.names import EndpointTag
from serve_common.protocol.snapshots import EndpointSnapshot
from serve_controller.core.forecast import forecast
from serve_controller.core.views.deployments import view_captures
from tests.support.control_loop.closed_loop import Loop
from tests.support.control_loop.orders import create_backend, create_endpoint

E = EndpointTag("default/e")


@pytest.fixture
def loop() -> Loop:
    """Two backends, and an endpoint ``e`` that sends everything to ``b``."""
    loop = Loop()
    for name in ("b", "c"):
        loop.command(create_backend(name))
    loop.done(create_endpoint("e", b=1.0))
    return loop


def published(loop: Loop) -> CaptureConfig | None:
    content = loop.checkpoint.snapshots["endpoints.default.e"].snapshot.content
    assert isinstance(content, EndpointSnapshot)
    return content.capture


def test_a_capture_is_published_to_proxies_and_listed(loop: Loop) -> None:
    loop.done(
        SetCapture(endpoint="e", share=0.01, bodies=True, redact=["$.user"], redact_headers=["X-A", "x-a"])
    )
    expected = CaptureConfig(share=0.01, bodies=True, redact=["$.user"], redact_headers=["x-a"])
    assert published(loop) == expected
    [view] = view_captures(loop.checkpoint)
    assert (view.endpoint_tag, view.capture) == (E, expected)


def test_the_same_again_changes_nothing_and_another_one_replaces_it(loop: Loop) -> None:
    loop.done(SetCapture(endpoint="e", share=0.01))
    assert not loop.ask(SetCapture(endpoint="e", share=0.01)).updating
    loop.done(SetCapture(endpoint="e", share=1, bodies=True))
    assert published(loop) == CaptureConfig(share=1, bodies=True)


def test_a_share_of_0_ends_it(loop: Loop) -> None:
    assert not loop.ask(SetCapture(endpoint="e", share=0)).updating
    loop.done(SetCapture(endpoint="e", share=0.5))
    loop.done(SetCapture(endpoint="e", share=0))
    assert published(loop) is None
    assert not loop.checkpoint.captures


def test_it_goes_with_its_endpoint(loop: Loop) -> None:
    loop.done(SetCapture(endpoint="e", share=0.5))
    loop.done(DeleteEndpoint(endpoint="e"))
    assert not loop.checkpoint.captures
    loop.done(create_endpoint("e", b=1.0))
    assert published(loop) is None


def test_a_pending_change_of_traffic_that_it_replaces_is_kept(loop: Loop) -> None:
    traffic = loop.command(SetTraffic(endpoint="e", weights={"c": 1.0}))
    capture = loop.command(SetCapture(endpoint="e", share=0.5))
    loop.settle()
    assert traffic.goal_id is not None
    assert capture.goal_id is not None
    assert loop.checkpoint.goals[traffic.goal_id].status is GoalStatus.SUPERSEDED
    assert loop.checkpoint.goals[capture.goal_id].status is GoalStatus.SUCCEEDED
    endpoint = loop.checkpoint.endpoints[E]
    assert endpoint.last_good is not None
    assert endpoint.target.traffic == endpoint.last_good.traffic == {"default/c": 1.0}


@pytest.mark.parametrize(
    ("command", "field"),
    [
        (SetCapture(endpoint="e", share=1.5), "share"),
        (SetCapture(endpoint="e", share=-1), "share"),
        (SetCapture(endpoint="e", share=float("nan")), "share"),
        (SetCapture(endpoint="e", share=1, bodies=True, redact=["user"]), r"redact\[0\]"),
        (SetCapture(endpoint="e", share=1, redact=["$.user"]), "redact: needs bodies"),
        (SetCapture(endpoint="e", share=1, redact_headers=["a b"]), "redact_headers"),
        (SetCapture(endpoint="e", share=1, redact_query=[""]), "redact_query"),
    ],
)
def test_what_cannot_be_captured_is_refused(loop: Loop, command: SetCapture, field: str) -> None:
    with pytest.raises(BadField, match=field):
        loop.command(command)


def test_an_unknown_endpoint_is_refused(loop: Loop) -> None:
    with pytest.raises(NotFound):
        loop.command(SetCapture(endpoint="nowhere", share=1))


def test_the_forecast_says_that_it_changes_something(loop: Loop) -> None:
    before = loop.checkpoint
    loop.command(SetCapture(endpoint="e", share=1))
    assert forecast(before, loop.checkpoint, loop.observed, loop.now).updating
