"""Which stack is meant, and whose credentials are used where."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from pathlib import Path

import pytest

from muster.cli.session import StackChoice, find_stack
from muster.embedded.options import StatePaths
from muster.embedded.run_record import RunRecord, write_record
from muster.secrets import Secrets, generate
from serve_common.errors import BadField, BusUnavailable
from serve_common.identities.credentials import CredentialsFile
from serve_common.identities.roles import Role

EMBEDDED_URL = "nats://127.0.0.1:4333"


def admin_of(secrets: Secrets) -> str:
    return str(secrets.credentials_file(Role.ADMIN))


def write_run_file(state_dir: Path) -> StatePaths:
    paths = StatePaths(state_dir.resolve())
    paths.root.mkdir(parents=True, exist_ok=True)
    record = RunRecord(
        stack_id="0123456789abcdef",
        state_dir=str(paths.root),
        pid=1,
        nats_url=EMBEDDED_URL,
        nats_monitor_url="http://127.0.0.1:8222",
        http_url="http://127.0.0.1:8000",
        postgres_dsn="postgresql://muster@127.0.0.1:5433/muster",
        secrets=str(paths.secrets),
        ports={},
        ops_urls={},
    )
    write_record(paths, record)
    return paths


@pytest.fixture
def embedded(tmp_path: Path) -> Iterator[str]:
    """An embedded stack that runs from `.muster`; its admin's credentials."""
    credentials = admin_of(generate(tmp_path / ".muster/secrets"))
    paths = write_run_file(tmp_path / ".muster")
    with paths.lock_file.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield credentials


def test_a_running_embedded_stack_is_found_from_below(tmp_path: Path, embedded: str) -> None:
    below = tmp_path / "a/b"
    below.mkdir(parents=True)
    found = find_stack(StackChoice(), {}, below)
    assert (found.urls, found.credentials_file, found.password) == ((EMBEDDED_URL,), embedded, None)


def test_a_running_embedded_stack_is_found_by_its_state_directory(tmp_path: Path, embedded: str) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    found = find_stack(StackChoice(), {"MUSTER_STATE_DIR": str(tmp_path / ".muster")}, elsewhere)
    assert found.credentials_file == embedded


def test_a_stopped_embedded_stack_is_not_meant(tmp_path: Path) -> None:
    write_run_file(tmp_path / ".muster").lock_file.touch()
    with pytest.raises(BusUnavailable, match="muster up"):
        find_stack(StackChoice(), {}, tmp_path)


def test_the_secrets_of_compose_are_used_when_no_embedded_stack_runs(tmp_path: Path) -> None:
    credentials = admin_of(generate(tmp_path / "secrets"))
    found = find_stack(StackChoice(), {}, tmp_path)
    assert (found.urls, found.credentials_file) == (("nats://127.0.0.1:4222",), credentials)
    given = find_stack(StackChoice(nats="nats://localhost:4555"), {}, tmp_path)
    assert given.credentials_file == credentials


def test_the_passwords_of_a_stack_with_plain_users_are_found_too(tmp_path: Path) -> None:
    password = generate(tmp_path / "secrets", plain=True).read("nats_admin")
    found = find_stack(StackChoice(), {}, tmp_path)
    assert (found.credentials_file, found.user, found.password) == (None, "admin", password)


def test_the_running_embedded_stack_goes_before_the_secrets_of_compose(tmp_path: Path, embedded: str) -> None:
    generate(tmp_path / "secrets")
    assert find_stack(StackChoice(), {}, tmp_path).credentials_file == embedded


def test_found_credentials_are_used_with_no_other_machine_and_for_no_other_user(
    tmp_path: Path, embedded: str
) -> None:
    generate(tmp_path / "secrets")
    for choice in (StackChoice(nats="nats://far.example"), StackChoice(user="proxy")):
        found = find_stack(choice, {}, tmp_path)
        assert (found.credentials_file, found.password) == (None, None)


def test_what_is_given_goes_before_what_is_found(tmp_path: Path, embedded: str) -> None:
    file = tmp_path / "password"
    file.write_text("from-file\n")
    variables = {
        "MUSTER_NATS_URL": "nats://me:from-url@far.example",
        "MUSTER_NATS_PASSWORD": "from-environment",
        "MUSTER_SUBJECT_PREFIX": "other",
    }
    from_url = find_stack(StackChoice(), variables, tmp_path)
    assert (from_url.urls, from_url.user) == (("nats://far.example:4222",), "me")
    assert (from_url.password, from_url.subject_prefix) == ("from-url", "other")
    from_file = find_stack(StackChoice(password_file=file, user="you"), variables, tmp_path)
    assert (from_file.user, from_file.password) == ("you", "from-file")
    plain = {**variables, "MUSTER_NATS_URL": "nats://far.example", "MUSTER_NATS_USER": "they"}
    from_environment = find_stack(StackChoice(), plain, tmp_path)
    assert (from_environment.user, from_environment.password) == ("they", "from-environment")
    by_file = {"MUSTER_NATS_URL": "nats://far.example", "MUSTER_NATS_PASSWORD_FILE": str(file)}
    assert find_stack(StackChoice(), by_file, tmp_path).password == "from-file"


def test_a_file_of_credentials_may_be_given(tmp_path: Path, embedded: str) -> None:
    given, named = tmp_path / "given.creds", tmp_path / "named.creds"
    given.touch()
    named.touch()
    variables = {"MUSTER_NATS_URL": "nats://far.example", "MUSTER_NATS_CREDS_FILE": "named.creds"}
    assert find_stack(StackChoice(), variables, tmp_path).credentials_file == str(named)
    chosen = find_stack(StackChoice(creds=Path("given.creds")), variables, tmp_path)
    assert (chosen.credentials_file, chosen.identity) == (str(given), str(given))
    # A plain user that is named goes before a file that only lies there.
    plain = find_stack(StackChoice(nats="nats://me:secret@far.example"), variables, tmp_path)
    assert (plain.credentials_file, plain.user, plain.password) == (None, "me", "secret")
    assert chosen.bus_settings("_INBOX_x").credentials == CredentialsFile(str(given))
    assert plain.bus_settings("_INBOX_x").is_plain


@pytest.mark.parametrize(
    ("choice", "variables", "field"),
    [
        (StackChoice(nats="http://x"), {}, "--nats"),
        (StackChoice(), {"MUSTER_NATS_URL": "http://x"}, "MUSTER_NATS_URL"),
        (StackChoice(nats="nats://x", password_file=Path("/absent")), {}, "--password-file"),
        (StackChoice(nats="nats://x"), {"MUSTER_NATS_PASSWORD_FILE": "/absent"}, "MUSTER_NATS_PASSWORD_FILE"),
        (StackChoice(nats="nats://x", creds=Path("/absent")), {}, "--creds"),
        (StackChoice(nats="nats://x"), {"MUSTER_NATS_CREDS_FILE": "/absent"}, "MUSTER_NATS_CREDS_FILE"),
        (StackChoice(nats="nats://x"), {"MUSTER_NATS_TLS_CA_FILE": "/absent"}, "MUSTER_NATS_TLS_CA_FILE"),
    ],
)
def test_what_cannot_be_used_is_refused_by_its_name(
    tmp_path: Path, choice: StackChoice, variables: dict[str, str], field: str
) -> None:
    with pytest.raises(BadField) as caught:
        find_stack(choice, variables, tmp_path)
    assert caught.value.field == field
