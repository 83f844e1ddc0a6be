"""Subjects and keys: what they are, that they parse back, and that they are written nowhere else."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from serve_common.errors import BadField
from serve_common.names import BackendTag, EndpointTag, HostId, ProxyId, replica_tag
from serve_common.protocol.subjects import BACKENDS, ENDPOINTS, Subjects, backend_key, endpoint_key, parse_key

ROOT = Path(__file__).parents[2]
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
