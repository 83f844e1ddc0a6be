"""What comes over the wires is bounded on decoding, and one message that is refused costs itself only."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import structlog

from serve_common.errors import BadField
from serve_common.names import BackendTag, EndpointTag, HostId, ProxyId, replica_tag
from serve_common.protocol.frames import (
    CloseHead,
    FrameUnreadable,
    ProbeHead,
    RequestHead,
    RequestKind,
    ResponseHead,
    decode_frame,
    encode_frame,
)
from serve_common.protocol.reports import (
    HostGoal,
    HostReport,
    LeaderNotice,
    ProxyReport,
    ReplayRecentLogs,
    Wake,
)
from serve_common.protocol.snapshots import Snapshot
from serve_common.protocol.subjects import (
    BACKENDS,
    ENDPOINTS,
    UNREADABLE,
    Subjects,
    backend_key,
    endpoint_key,
    parse_key,
)
from serve_common.telemetry.log_lines import KINDS, RefusedMessages
from serve_controller.core.checkpoint import Checkpoint
from serve_controller.shell import observations as hearing
from serve_controller.shell.observations import TermObservations
from tests.support.control_loop.pure_host import PureHost
from tests.support.paths import ROOT

HUGE = 10**30
LONG = "x" * 100_000
HOST: dict[str, Any] = {
    "host_id": "h",
    "incarnation": "i",
    "sequence": 1,
    "started_at": 1.0,
    "epoch": 1,
    "generation": 1,
    "resources": {"CPU": 4.0},
    "replicas": [],
}
PROXY: dict[str, Any] = {
    "proxy_id": "p",
    "incarnation": "i",
    "sequence": 1,
    "started_at": 1.0,
    "applied_snapshot_id": 1,
}
REPLICA: dict[str, Any] = {"replica_tag": "default/a#1", "status": "running"}
GOAL: dict[str, Any] = {"host_id": "h", "epoch": 1, "generation": 1, "replicas": []}
REPLICA_GOAL: dict[str, Any] = {
    "replica_tag": "default/a#1",
    "backend_tag": "default/a",
    "replica_config": {"import_path": "a:b"},
    "config_version": 1,
    "max_concurrent_queries": 1,
    "graceful_shutdown_timeout_s": 1.0,
    "health_check_period_s": 1.0,
    "health_check_timeout_s": 1.0,
    "start_timeout_s": 1.0,
}
BACKEND: dict[str, Any] = {
    "type": "backend",
    "backend_tag": "default/a",
    "replicas": [],
    "draining": [],
    "max_concurrent_queries": 1,
    "max_queued_requests": 1,
}
SOUND: list[tuple[Any, dict[str, Any]]] = [
    (HostReport, {**HOST, "replicas": [REPLICA]}),
    (ProxyReport, PROXY),
    (HostGoal, {**GOAL, "replicas": [REPLICA_GOAL]}),
    (LeaderNotice, {"controller_id": "c", "epoch": 1}),
    (Wake, {"backend_tag": "default/a", "waiting": 1}),
    (ReplayRecentLogs, {"token": "t"}),
    (Snapshot, {"snapshot_id": 1, "epoch": 1, "content": BACKEND}),
]
UNSOUND: list[tuple[Any, dict[str, Any]]] = [
    *((HostReport, {**HOST, "resources": {"CPU": amount}}) for amount in (1e308, -1.0, "4", None)),
    (HostReport, {**HOST, "resources": {LONG: 1.0}}),
    (HostReport, {**HOST, "resources": {f"r{n}": 1.0 for n in range(1_001)}}),
    *((HostReport, {**HOST, name: HUGE}) for name in ("sequence", "epoch", "generation", "started_at")),
    *((HostReport, {**HOST, name: -1}) for name in ("sequence", "epoch", "generation", "started_at")),
    *((HostReport, {**HOST, name: LONG}) for name in ("host_id", "incarnation", "metrics_url")),
    *((HostReport, {**HOST, "replicas": [{**REPLICA, name: HUGE}]}) for name in ("pid", "config_version")),
    *((HostReport, {**HOST, "replicas": [{**REPLICA, name: LONG}]}) for name in ("replica_tag", "error")),
    *((ProxyReport, {**PROXY, name: HUGE}) for name in ("sequence", "applied_snapshot_id", "started_at")),
    *((ProxyReport, {**PROXY, name: LONG}) for name in ("proxy_id", "address", "http_error", "metrics_url")),
    *((HostGoal, {**GOAL, name: HUGE}) for name in ("epoch", "generation")),
    *(
        (HostGoal, {**GOAL, "replicas": [{**REPLICA_GOAL, name: 1e300}]})
        for name in REPLICA_GOAL
        if "_s" in name
    ),
    (LeaderNotice, {"controller_id": "c", "epoch": HUGE}),
    (LeaderNotice, {"controller_id": LONG, "epoch": 1}),
    (Wake, {"backend_tag": "default/a", "waiting": HUGE}),
    (Wake, {"backend_tag": LONG, "waiting": 1}),
    (ReplayRecentLogs, {"token": LONG}),
    (ReplayRecentLogs, {"token": "t", "limit": HUGE}),
    (Snapshot, {"snapshot_id": HUGE, "epoch": 1, "content": None}),
    (Snapshot, {"snapshot_id": 1, "epoch": -1, "content": None}),
    (Snapshot, {"snapshot_id": 1, "epoch": 1, "content": {**BACKEND, "max_queued_requests": HUGE}}),
]


@pytest.mark.parametrize(("message", "fields"), SOUND, ids=lambda x: getattr(x, "__name__", ""))
def test_what_is_sound_is_read(message: Any, fields: dict[str, Any]) -> None:
    value = msgspec.json.decode(json.dumps(fields), type=message)
    assert msgspec.json.decode(msgspec.json.encode(value), type=message) == value


@pytest.mark.parametrize(("message", "fields"), UNSOUND, ids=lambda x: getattr(x, "__name__", ""))
def test_what_breaks_a_bound_is_refused(message: Any, fields: dict[str, Any]) -> None:
    with pytest.raises(UNREADABLE):
        msgspec.json.decode(json.dumps(fields), type=message)


@pytest.mark.parametrize(
    "head",
    [
        RequestHead(RequestKind.HTTP, "GET", "/", "/", "", [], float("inf"), 0, "e", "r"),
        RequestHead(RequestKind.HTTP, "GET", "/", "/", "", [], float("nan"), 0, "e", "r"),
        RequestHead(RequestKind.HTTP, "GET", "/", "/", "", [], 1.0, -2, "e", "r"),
        ProbeHead(1e300),
        ResponseHead(70_000, [], last=True, in_flight=0),
        ResponseHead(-1, [], last=True, in_flight=0),
        CloseHead(70_000, ""),
    ],
    ids=repr,
)
def test_a_frame_that_breaks_a_bound_is_no_frame(head: Any) -> None:
    with pytest.raises(FrameUnreadable):
        decode_frame(encode_frame(head))


def test_a_report_that_cannot_be_taken_in_costs_that_report_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it is about one that nobody thought of: the others are heard, and what was heard before stays."""
    bad, good = PureHost("bad"), PureHost("good")
    refused: list[tuple[str, str, str]] = []
    heard = TermObservations(100.0, lambda kind, sender, error: refused.append((kind, sender, repr(error))))
    heard.on_report(bad.report(), 100.0)
    heard.fold(Checkpoint(), 100.0)
    before = heard.observed.hosts[HostId("bad")]
    observe = hearing.observe_host

    def fails_at_one(observed: Any, report: HostReport, now: float, holder: str) -> Any:
        if report.host_id == "bad":
            raise OverflowError("cannot convert float infinity to integer")
        return observe(observed, report, now, holder)

    monkeypatch.setattr(hearing, "observe_host", fails_at_one)
    heard.on_report(bad.report(), 101.0)
    heard.on_report(good.report(), 101.0)
    heard.fold(Checkpoint(), 101.0)
    assert [(kind, sender) for kind, sender, _ in refused] == [("host_report", "bad")]
    assert "OverflowError" in refused[0][2]
    assert heard.observed.hosts[HostId("bad")] is before
    assert HostId("good") in heard.observed.hosts


def test_refused_messages_are_all_counted_and_seldom_logged() -> None:
    now = [0.0]
    refused = RefusedMessages(lambda: now[0])
    with structlog.testing.capture_logs() as lines:
        for _ in range(1_000):
            now[0] += 0.001
            refused.refuse("host_report", "serve.report.host.h", ValueError(LONG))
            refused.refuse("wake", "\x1b[2J", ValueError("no"))
    assert refused.counts == {**dict.fromkeys(KINDS, 0), "host_report": 1_000, "wake": 1_000}
    assert len(lines) <= 4
    assert all(len(repr(line)) < 2_000 and "\x1b" not in repr(line) for line in lines)


# Subjects and keys: what they are, that they parse back, and that they are written nowhere else.


SUBJECTS = Subjects()
HOME = ROOT / "libs/serve_common/serve_common/protocol/subjects.py"
TABLE = ROOT / "libs/serve_common/serve_common/identities/roles.py"
"""Whose permissions are patterns of subjects."""


def test_the_subjects_are_those_of_the_contract() -> None:
    assert SUBJECTS.admin("deploy") == "serve.admin.deploy"
    assert SUBJECTS.call(EndpointTag("shop/digits")) == "serve.call.shop.digits"
    assert SUBJECTS.replica(replica_tag(BackendTag("shop/digits"), 7)) == "serve.replica.shop.digits.7"
    assert SUBJECTS.host_goal(HostId("h1")) == "serve.host.h1.goal"
    assert SUBJECTS.host_report(HostId("h1")) == "serve.report.host.h1"
    assert SUBJECTS.proxy_report(ProxyId("p1")) == "serve.report.proxy.p1"
    assert SUBJECTS.wake(BackendTag("shop/digits")) == "serve.wake.shop.digits"
    assert SUBJECTS.parse_wake_backend("serve.wake.shop.digits") == "shop/digits"
    assert (SUBJECTS.leader, SUBJECTS.bucket) == ("serve.leader", "serve-snapshots")


def test_two_instances_share_no_subject() -> None:
    other = Subjects("other")
    for name in ("bucket", "admin_group", "calls", "leader", "host_reports", "proxy_reports", "wakes"):
        assert getattr(SUBJECTS, name) != getattr(other, name)
        assert getattr(other, name).startswith("other")


@pytest.mark.parametrize("prefix", ["", "a.b", "*", ">", "a b", "$SYS", "_INBOX", "x" * 64])
def test_a_prefix_is_one_name(prefix: str) -> None:
    with pytest.raises(BadField) as refused:
        Subjects(prefix)
    assert refused.value.field == "subject_prefix"


def test_a_call_of_one_token_is_of_the_default_application() -> None:
    assert SUBJECTS.parse_call_endpoint("serve.call.digits") == "default/digits"
    assert SUBJECTS.parse_call_endpoint("serve.call.shop.digits") == "shop/digits"


def test_keys_parse_back_and_others_are_refused() -> None:
    assert parse_key(endpoint_key(EndpointTag("a/b"))) == (ENDPOINTS, "a/b")
    assert parse_key(backend_key(BackendTag("a/b"))) == (BACKENDS, "a/b")
    for key in ("", "endpoints", "endpoints.", "strangers.a.b", "x" * 10_000):
        with pytest.raises(BadField):
            parse_key(key)


def code_files() -> Iterator[Path]:
    for folder in ("libs", "services"):
        yield from (
            p for p in (ROOT / folder).rglob("*.py") if p not in (HOME, TABLE) and "test" not in p.parts
        )


def literals(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Strings that the program uses; docstrings are prose."""
    prose = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            yield node.lineno, node.value


def written_elsewhere(source: str) -> list[tuple[int, str]]:
    words = ("admin", "call", "replica", "host", "report", "event", "leader")
    starts = tuple(f"serve.{word}" for word in words)
    middles = tuple(f".{word}." for word in ("admin", "call", "replica", "report"))
    keys = (f"{ENDPOINTS}.", f"{BACKENDS}.")
    found = []
    for line, text in literals(ast.parse(source)):
        is_subject = text.startswith((*starts, *keys)) or text in {"serve-snapshots", "serve-admin"}
        # Pieces of an f-string: ``f"{prefix}.admin.{verb}"``.
        is_piece = text.startswith(middles) and " " not in text and text.endswith(".")
        if is_subject or is_piece:
            found.append((line, text))
    return found


def test_no_other_module_writes_a_subject() -> None:
    files = list(code_files())
    assert len(files) > 50
    found = {str(p.relative_to(ROOT)): w for p in files if (w := written_elsewhere(p.read_text("utf-8")))}
    assert found == {}


@pytest.mark.parametrize(
    "source",
    ['x = "serve.admin.deploy"', 'f"{p}.report.host.{h}"', 'b = "serve-snapshots"', 'k = f"backends.{t}"'],
)
def test_the_search_for_subjects_finds_them(source: str) -> None:
    assert written_elsewhere(source) or "host" in source
    assert written_elsewhere('"""Sent to serve.admin.deploy."""\nx = "the report. a host"') == []
