"""Settings of the console: each bad one is named."""

from __future__ import annotations

import pytest

from serve_common.errors import BadField
from serve_common.identities.roles import Role
from serve_common.runtime.settings import Environment
from serve_console.settings import read_settings

PEOPLE = {"MUSTER_CONSOLE_USERS_FILE": "/secrets/console_users.json"}
TRUSTED = {
    "MUSTER_CONSOLE_TRUSTED_HEADER": "X-User",
    "MUSTER_CONSOLE_TRUSTED_FROM": "10.0.0.1, fd00::/8",
    "MUSTER_CONSOLE_VIEW_CREDS_FILE": "/secrets/view.creds",
}


def test_the_defaults_are_for_one_machine() -> None:
    settings = read_settings(Environment(PEOPLE))
    assert (settings.http_host, settings.http_port, settings.operations.port) == ("127.0.0.1", 8080, 9104)
    assert settings.trusted is None
    assert not settings.is_https
    assert settings.allowed_hosts == frozenset()
    assert settings.stack.urls == ("nats://127.0.0.1:4222",)


def test_a_trusted_proxy_needs_no_people_and_its_role_is_view() -> None:
    settings = read_settings(Environment(TRUSTED))
    assert settings.people_file is None
    assert settings.trusted is not None
    assert (settings.trusted.role, set(settings.trusted.credentials)) == (Role.VIEW, {Role.VIEW})
    assert len(settings.trusted.networks) == 2


@pytest.mark.parametrize(
    ("variables", "name"),
    [
        ({}, "MUSTER_CONSOLE_USERS_FILE"),
        ({**PEOPLE, "MUSTER_CONSOLE_PORT": "99999"}, "MUSTER_CONSOLE_PORT"),
        ({**PEOPLE, "MUSTER_CONSOLE_HTTPS": "yes"}, "MUSTER_CONSOLE_HTTPS"),
        (
            {**PEOPLE, "MUSTER_CONSOLE_ALLOWED_HOSTS": "a.example,http://b.example"},
            "MUSTER_CONSOLE_ALLOWED_HOSTS",
        ),
        ({**PEOPLE, "MUSTER_CONSOLE_ALLOWED_HOSTS": "a.example:443"}, "MUSTER_CONSOLE_ALLOWED_HOSTS"),
        ({**PEOPLE, "MUSTER_CONSOLE_ALLOWED_HOSTS": "*"}, "MUSTER_CONSOLE_ALLOWED_HOSTS"),
        ({**PEOPLE, "MUSTER_CONSOLE_SESSION_IDLE_S": "1"}, "MUSTER_CONSOLE_SESSION_IDLE_S"),
        ({**PEOPLE, "MUSTER_CONSOLE_SESSION_S": "nan"}, "MUSTER_CONSOLE_SESSION_S"),
        ({**PEOPLE, "MUSTER_CONSOLE_GRAFANA_URL": "javascript:alert(1)"}, "MUSTER_CONSOLE_GRAFANA_URL"),
        ({**PEOPLE, "MUSTER_CONSOLE_HTTP_URL": "models.example"}, "MUSTER_CONSOLE_HTTP_URL"),
        ({**PEOPLE, "MUSTER_CONSOLE_TRACES_URL": "http://traces"}, "MUSTER_CONSOLE_TRACES_URL"),
        ({**PEOPLE, "MUSTER_NATS_URL": "http://nats"}, "MUSTER_NATS_URL"),
        ({**PEOPLE, "MUSTER_SUBJECT_PREFIX": "a.b"}, "MUSTER_SUBJECT_PREFIX"),
        ({**TRUSTED, "MUSTER_CONSOLE_TRUSTED_FROM": ""}, "MUSTER_CONSOLE_TRUSTED_FROM"),
        ({**TRUSTED, "MUSTER_CONSOLE_TRUSTED_FROM": "10.0.0.1/8"}, "MUSTER_CONSOLE_TRUSTED_FROM"),
        ({**TRUSTED, "MUSTER_CONSOLE_TRUSTED_FROM": "proxy.example"}, "MUSTER_CONSOLE_TRUSTED_FROM"),
        ({**TRUSTED, "MUSTER_CONSOLE_TRUSTED_ROLE": "admin"}, "MUSTER_CONSOLE_TRUSTED_ROLE"),
    ],
)
def test_what_is_wrong_is_named(variables: dict[str, str], name: str) -> None:
    with pytest.raises(BadField) as failure:
        read_settings(Environment(variables))
    assert failure.value.field == name
