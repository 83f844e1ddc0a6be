"""Handles find their stack as the command line does, and come as a user of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from muster.handles.runtime import find_bus, find_bus_outside_replica
from muster.secrets import generate
from serve_common.errors import BusUnavailable
from serve_common.identities.credentials import CredentialsFile
from serve_common.identities.roles import Role
from serve_common.names import BackendTag, ReplicaTag
from serve_common.runtime.request_context import CurrentReplica, set_replica_context
from serve_common.runtime.settings import BusSettings


@pytest.fixture
def password(tmp_path: Path) -> str:
    return generate(tmp_path / "secrets", plain=True).read("nats_client")


def test_credentials_lie_with_the_stack_that_is_found(tmp_path: Path) -> None:
    secrets = generate(tmp_path / "secrets")
    (tmp_path / "deep" / "down").mkdir(parents=True)
    admins = {"MUSTER_NATS_CREDS": str(secrets.credentials_file(Role.ADMIN))}
    for variables in ({}, admins):
        bus = find_bus_outside_replica(variables, tmp_path / "deep" / "down")
        assert bus.servers == ["nats://127.0.0.1:4222"]
        assert bus.credentials == CredentialsFile(str(secrets.credentials_file(Role.CLIENT)))
        assert (bus.inbox_prefix, bus.subject_prefix) == ("_INBOX_client", "serve")


def test_credentials_may_be_given(tmp_path: Path) -> None:
    file = tmp_path / "given.creds"
    file.touch()
    bus = find_bus_outside_replica(
        {"MUSTER_NATS_URL": "nats://elsewhere", "MUSTER_CLIENT_CREDS": str(file)}, tmp_path
    )
    assert (bus.servers, bus.credentials) == (["nats://elsewhere:4222"], CredentialsFile(str(file)))


def test_the_password_lies_with_the_stack_that_is_found(tmp_path: Path, password: str) -> None:
    (tmp_path / "deep" / "down").mkdir(parents=True)
    bus = find_bus_outside_replica({}, tmp_path / "deep" / "down")
    assert (bus.servers, bus.user, bus.password) == (["nats://127.0.0.1:4222"], "client", password)
    assert (bus.inbox_prefix, bus.subject_prefix) == ("_INBOX_client", "serve")


def test_an_admins_credentials_are_not_the_handles(tmp_path: Path, password: str) -> None:
    variables = {
        "MUSTER_NATS_URL": "nats://admin:hunter22@localhost:4300",
        "MUSTER_NATS_USER": "admin",
        "MUSTER_NATS_PASSWORD": "hunter22",
    }
    bus = find_bus_outside_replica(variables, tmp_path)
    assert (bus.servers, bus.user, bus.password) == (["nats://localhost:4300"], "client", password)


def test_a_password_never_goes_to_another_machine(tmp_path: Path, password: str) -> None:
    assert find_bus_outside_replica({"MUSTER_NATS_URL": "nats://elsewhere:4222"}, tmp_path).password == ""


@pytest.mark.parametrize(
    "variables",
    [
        {"MUSTER_NATS_URL": "nats://client:secret-1@elsewhere"},
        {"MUSTER_NATS_URL": "nats://elsewhere", "MUSTER_CLIENT_PASSWORD": "secret-1"},
        {"MUSTER_NATS_URL": "nats://client:old@elsewhere", "MUSTER_CLIENT_PASSWORD": "secret-1"},
    ],
)
def test_a_password_may_be_given(tmp_path: Path, variables: dict[str, str]) -> None:
    bus = find_bus_outside_replica(variables, tmp_path)
    assert (bus.servers, bus.password) == (["nats://elsewhere:4222"], "secret-1")


def test_a_password_may_come_from_a_file_and_the_user_have_another_name(tmp_path: Path) -> None:
    (tmp_path / "given").write_text("secret-1\n")
    variables = {
        "MUSTER_NATS_URL": "nats://elsewhere",
        "MUSTER_CLIENT_USER": "team-a",
        "MUSTER_CLIENT_PASSWORD_FILE": str(tmp_path / "given"),
    }
    bus = find_bus_outside_replica(variables, tmp_path)
    assert (bus.user, bus.password) == ("team-a", "secret-1")


def test_no_stack_at_all_is_told(tmp_path: Path) -> None:
    with pytest.raises(BusUnavailable, match="no stack was found"):
        find_bus_outside_replica({}, tmp_path)


def test_a_replica_uses_its_own_bus() -> None:
    bus = BusSettings(
        servers=["nats://x"], user="replica", password="p", inbox_prefix="_INBOX_replica", subject_prefix="s"
    )
    context = CurrentReplica(
        replica_tag=ReplicaTag("a/b#0"),
        backend_tag=BackendTag("a/b"),
        bus=bus,
        code_version=1,
        companions={},
    )
    set_replica_context(context)
    try:
        assert find_bus() is bus
    finally:
        set_replica_context(None)
