"""Errors as clients of programs for Ray Serve receive them; problem details are in test_headers."""

from __future__ import annotations

import pytest

from serve_common.config.backend import BackpressureConfig, ErrorFormat
from serve_common.dispatch.errors import BackPressureError, MethodNotAllowed, NoRoute, ReplicaError
from serve_common.errors import DeadlineExceeded, NoReplicaAvailable, ReplicaDied, ServeError
from serve_common.names import BackendTag
from serve_common.protocol.snapshots import BackendProtection
from serve_proxy.core.problems import build_problem, encode_problem

_CONFIGURED = BackendProtection(backpressure_config=BackpressureConfig(status_code=429, retry_after_s=6.5))


def full(protection: BackendProtection) -> BackPressureError:
    return BackPressureError.of_backend(BackendTag("default/Model"), 3, protection)


_FULL = "Request dropped due to backpressure (num_queued_requests=3, max_queued_requests=3)."


@pytest.mark.parametrize(
    ("error", "status", "text", "headers"),
    [
        (ReplicaError("user_code_raised", 500, "ValueError: secret"), 500, "Internal Server Error", ()),
        (ServeError("the proxy failed"), 500, "Internal Server Error", ()),
        (DeadlineExceeded("no response in 1 s"), 408, "Request timed out: no response in 1 s.", ()),
        (ReplicaError("deadline_exceeded", 504, "a child's"), 408, "Request timed out: a child's.", ()),
        (ReplicaDied("it may have run"), 500, "Internal Server Error", ()),
        (NoReplicaAvailable("none runs"), 503, "The deployment is unavailable: none runs.", ()),
        (
            full(BackendProtection()),
            503,
            _FULL,
            (),
        ),
        (
            full(_CONFIGURED),
            429,
            _FULL,
            (("Retry-After", "7"),),
        ),
        (MethodNotAllowed("PUT", "GET"), 405, None, (("Allow", "GET"),)),
        (NoRoute("/x", ErrorFormat.TEXT), 404, None, ()),
    ],
)
def test_the_text_is_ray_serves(
    error: ServeError, status: int, text: str | None, headers: tuple[tuple[str, str], ...]
) -> None:
    problem = build_problem(error, ErrorFormat.TEXT)
    assert (problem.status, problem.headers) == (status, headers)
    expected = str(error) if text is None else text
    assert encode_problem(problem, "r-1") == ("text/plain; charset=utf-8", expected.encode())


def test_plain_text_names_the_request_that_timed_out_and_its_limit() -> None:
    error = DeadlineExceeded("replica default/Model#1 did not answer in time")
    problem = build_problem(error, ErrorFormat.TEXT, "r1", 1.0004)
    assert (problem.status, problem.text) == (408, "Request r1 timed out after 1.0s.")
    assert build_problem(error, ErrorFormat.PROBLEM, "r1", 1.0).message == str(error)
    early = build_problem(error, ErrorFormat.TEXT, "r1", -5.0)  # before it had a limit of its own
    assert early.text == f"Request timed out: {error}."
