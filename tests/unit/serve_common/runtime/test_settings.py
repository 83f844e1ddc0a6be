"""Settings from the environment: every error names its variable, and no secret is shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from serve_common.errors import BadField
from serve_common.identities.roles import Role
from serve_common.runtime.settings import Environment, read_bus_settings, read_operations_settings
from serve_controller.settings import read_settings


def refused(call: object, *arguments: object) -> BadField:
    with pytest.raises(BadField) as caught:
        call(*arguments)
    return caught.value


def test_what_is_absent_or_empty_has_its_default() -> None:
    environment = Environment({"EMPTY": ""})
    assert environment.text("EMPTY", "x") == "x"
    assert environment.optional("EMPTY") is None
    assert environment.integer("EMPTY", 7, 0, 9) == 7
    assert refused(environment.text, "NOBODY").field == "NOBODY"


@pytest.mark.parametrize("value", ["x", "1.5", "-1", "10", "9" * 400, "9" * 5000, "nan", "0x1"])
def test_a_number_that_is_none_or_out_of_range_is_refused_with_its_name(value: str) -> None:
    error = refused(Environment({"N": value}).integer, "N", 1, 0, 9)
    assert error.field == "N"
    assert len(str(error)) < 200


@pytest.mark.parametrize("value", ["nan", "inf", "-0.1", "1e999", "s"])
def test_a_duration_that_is_none_is_refused(value: str) -> None:
    assert refused(Environment({"S": value}).seconds, "S", 1.0, 0.0, 60.0).field == "S"


def test_a_secret_comes_from_its_file_or_else_from_its_variable(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("hunter2\n", encoding="utf-8")
    assert Environment({"P_FILE": str(path), "P": "other"}).secret("P") == "hunter2"
    assert Environment({"P": "other"}).secret("P") == "other"
    assert refused(Environment({}).secret, "P").field == "P"


def test_a_secrets_file_that_cannot_be_read_is_named_and_not_shown(tmp_path: Path) -> None:
    assert refused(Environment({"P_FILE": str(tmp_path / "none")}).secret, "P").field == "P_FILE"
    path = tmp_path / "binary"
    path.write_bytes(b"\xff\xfehunter2")
    error = refused(Environment({"P_FILE": str(path)}).secret, "P")
    assert error.field == "P_FILE"
    assert "hunter2" not in str(error)


def test_an_identity_is_the_given_name_or_made_from_the_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Environment({"ID": "host-7"}).identity("ID") == "host-7"
    assert refused(Environment({"ID": "a.b"}).identity, "ID").field == "ID"
    for machine in ("web-1.example.com", "-.-", "ünïx", "x" * 200, ""):
        monkeypatch.setattr("socket.gethostname", lambda machine=machine: machine)
        assert Environment({}).identity("ID")


def test_the_bus_settings_of_a_role() -> None:
    environment = Environment(
        {"MUSTER_NATS_URL": " nats://a:1 , nats://b:2,", "MUSTER_NATS_PASSWORD": "hunter2"}
    )
    settings = read_bus_settings(environment, Role.PROXY, "p-1")
    assert settings.servers == ["nats://a:1", "nats://b:2"]
    assert (settings.user, settings.inbox_prefix, settings.subject_prefix) == (
        "proxy",
        "_INBOX_proxy.p-1",
        "serve",
    )
    assert "hunter2" not in repr(settings)


@pytest.mark.parametrize(
    ("variables", "field"),
    [
        ({"MUSTER_NATS_URL": " , "}, "MUSTER_NATS_URL"),
        ({"MUSTER_SUBJECT_PREFIX": "a.b"}, "MUSTER_SUBJECT_PREFIX"),
        ({"MUSTER_NATS_PASSWORD": ""}, "MUSTER_NATS_CREDS_FILE"),
        ({"MUSTER_NATS_PASSWORD": "", "MUSTER_NATS_CREDS_FILE": "/absent"}, "MUSTER_NATS_CREDS_FILE"),
        ({"MUSTER_NATS_PASSWORD": "", "MUSTER_NATS_CREDS_FILE": __file__}, "MUSTER_NATS_CREDS_FILE"),
        ({"MUSTER_NATS_PASSWORD": "", "MUSTER_NATS_KEYS_FILE": "/absent"}, "MUSTER_NATS_KEYS_FILE"),
        ({"MUSTER_NATS_PASSWORD": "", "MUSTER_NATS_KEYS_FILE": __file__}, "MUSTER_NATS_KEYS_FILE"),
        ({"MUSTER_NATS_PASSWORD": "", "MUSTER_NATS_PASSWORD_FILE": "/absent"}, "MUSTER_NATS_PASSWORD_FILE"),
        ({"MUSTER_DIRECT": "some"}, "MUSTER_DIRECT"),
        ({"MUSTER_DIRECT_HOST": "replica-host"}, "MUSTER_DIRECT_HOST"),
        ({"MUSTER_DIRECT_HOST": "10.0.0.1:5"}, "MUSTER_DIRECT_HOST"),
        ({"MUSTER_DIRECT_PORTS": "x"}, "MUSTER_DIRECT_PORTS"),
        ({"MUSTER_DIRECT_PORTS": "30000-29999"}, "MUSTER_DIRECT_PORTS"),
        ({"MUSTER_DIRECT_PORTS": "0-5"}, "MUSTER_DIRECT_PORTS"),
        ({"MUSTER_DIRECT_PORTS": "65536"}, "MUSTER_DIRECT_PORTS"),
        ({"MUSTER_DIRECT_ADVERTISE": "a b"}, "MUSTER_DIRECT_ADVERTISE"),
        ({"MUSTER_DIRECT_ADVERTISE": "a" * 256}, "MUSTER_DIRECT_ADVERTISE"),
    ],
)
def test_bad_bus_settings_name_their_variable(variables: dict[str, str], field: str) -> None:
    environment = Environment({"MUSTER_NATS_PASSWORD": "x", **variables})
    assert refused(read_bus_settings, environment, Role.PROXY).field == field


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, ("", (0, 0), "")),
        ({"HOST": "0.0.0.0"}, ("0.0.0.0", (0, 0), "")),
        ({"HOST": "::", "PORTS": "30000-30999"}, ("::", (30_000, 30_999), "")),
        (
            {"HOST": "10.0.0.1", "PORTS": "7000", "ADVERTISE": "a.example"},
            ("10.0.0.1", (7_000, 7_000), "a.example"),
        ),
        ({"HOST": "10.0.0.1", "ADVERTISE": "fd00::7"}, ("10.0.0.1", (0, 0), "fd00::7")),
    ],
)
def test_where_direct_links_are_accepted(variables: dict[str, str], expected: tuple[object, ...]) -> None:
    direct = {f"MUSTER_DIRECT_{name}": value for name, value in variables.items()}
    settings = read_bus_settings(Environment({"MUSTER_NATS_PASSWORD": "x", **direct}), Role.REPLICA)
    assert (settings.direct_host, settings.direct_ports, settings.direct_advertise) == expected


def test_the_controllers_settings_show_no_secret() -> None:
    environment = Environment(
        {
            "MUSTER_NATS_PASSWORD": "hunter2",
            "MUSTER_POSTGRES_PASSWORD": "hunter3",
            "MUSTER_CONTROLLER_ID": "c1",
            "MUSTER_OPS_PORT": "0",
        }
    )
    settings = read_settings(environment)
    assert "hunter" not in repr(settings)
    assert (settings.controller_id, settings.operations.port) == ("c1", 0)
    assert (
        refused(read_operations_settings, Environment({"MUSTER_OPS_PORT": "65536"}), 1).field
        == "MUSTER_OPS_PORT"
    )
