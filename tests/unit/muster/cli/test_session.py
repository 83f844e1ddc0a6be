"""Which stack is meant, and whose credentials are used where."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from muster.cli.session import StackChoice, find_stack
from muster.client.contexts import Context, Contexts, contexts_file, write_contexts
from muster.embedded.options import StatePaths
from muster.embedded.run_record import RunRecord, write_record
from muster.handles.runtime import find_bus_outside_replica
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
    assert (chosen.credentials_file, chosen.shown_identity) == (str(given), str(given))
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


@pytest.mark.parametrize(
    ("variables", "env_file", "nats", "http"),
    [
        ({}, None, "nats://127.0.0.1:4222", "http://127.0.0.1:8000"),
        ({"MUSTER_NATS_PORT": "4333", "MUSTER_HTTP_PORT": "0.0.0.0:8080"}, None, "4333", "http://127.0.0.1:8080"),
        ({}, "# ours\nMUSTER_NATS_PORT='127.0.0.1:4444'\nMUSTER_HTTP_PORT=10.0.0.7:80\n", "4444", "http://10.0.0.7:80"),
        ({"MUSTER_NATS_PORT": "4333"}, "MUSTER_NATS_PORT=4444\nMUSTER_HTTP_PORT=0\n", "4333", ""),
        ({"MUSTER_TLS": "/certificates"}, None, "4222", "https://127.0.0.1:8000"),
    ],
)  # fmt: skip
def test_the_stack_of_compose_is_found_where_it_is_published(
    tmp_path: Path, variables: dict[str, str], env_file: str | None, nats: str, http: str
) -> None:
    generate(tmp_path / "secrets")
    if env_file is not None:
        (tmp_path / ".env").write_text(env_file)
    found = find_stack(StackChoice(), variables, tmp_path)
    assert found.urls[0].endswith(nats)
    assert (found.http_url, found.credentials_file) == (http, admin_of(Secrets(tmp_path / "secrets")))


def test_a_port_that_docker_chose_is_asked_for(tmp_path: Path) -> None:
    generate(tmp_path / "secrets")
    with pytest.raises(BadField, match="docker compose port nats 4222"):
        find_stack(StackChoice(), {"MUSTER_NATS_PORT": "127.0.0.1:0"}, tmp_path)


def store(directory: Path, **contexts: Context) -> dict[str, str]:
    """Contexts of a user whose home is ``directory``, the first of them in use; the user's variables."""
    variables = {"HOME": str(directory)}
    write_contexts(variables, Contexts(current=next(iter(contexts), None), contexts=contexts))
    return variables


def test_each_way_to_name_a_stack_goes_before_those_below(tmp_path: Path, embedded: str) -> None:
    creds = tmp_path / "prod.creds"
    creds.touch()
    variables = store(
        tmp_path,
        prod=Context(nats="nats://prod.example:4222", creds=str(creds), http="https://models.example"),
        test=Context(nats="nats://test.example:4222", user="me"),
    )
    named, state = {**variables, "MUSTER_CONTEXT": "test"}, {"MUSTER_STATE_DIR": str(tmp_path / ".muster")}
    url = {"MUSTER_NATS_URL": "nats://url.example"}
    for choice, given, host in (
        (StackChoice(nats="nats://given.example"), {**named, **url}, "given.example"),
        (StackChoice(context="prod"), {**named, **url}, "prod.example"),
        (StackChoice(), {**named, **url}, "url.example"),
        (StackChoice(), {**named, **state}, "127.0.0.1"),
        (StackChoice(), named, "test.example"),
        (StackChoice(), variables, "prod.example"),
        (StackChoice(context="local"), named, "127.0.0.1"),
        (StackChoice(), {**named, "MUSTER_CONTEXT": "local"}, "127.0.0.1"),
    ):
        assert find_stack(choice, given, tmp_path).host == host, (choice, given)
    found = find_stack(StackChoice(), variables, tmp_path)
    assert (found.credentials_file, found.http_url) == (str(creds), "https://models.example")


def test_credentials_of_one_stack_reach_no_other(tmp_path: Path) -> None:
    """Neither those of a context another stack's, nor those of the environment a context's."""
    password = tmp_path / "password"
    password.write_text("of-prod\n")
    variables = store(tmp_path, prod=Context(nats="nats://prod.example", password_file=str(password)))
    assert find_stack(StackChoice(), variables, tmp_path).password == "of-prod"
    far = find_stack(StackChoice(nats="nats://far.example"), variables, tmp_path)
    assert (far.password, far.credentials_file) == (None, None)
    secret = {**variables, "MUSTER_NATS_PASSWORD": "of-the-environment"}
    assert find_stack(StackChoice(context="prod"), secret, tmp_path).password == "of-prod"
    assert find_stack(StackChoice(), secret, tmp_path).host == "127.0.0.1"
    other_user = find_stack(StackChoice(user="you"), variables, tmp_path)
    assert (other_user.user, other_user.password) == ("you", None)


def test_handles_find_the_context_too_with_credentials_of_their_own(tmp_path: Path) -> None:
    admin, client = tmp_path / "admin.creds", tmp_path / "client.creds"
    admin.touch()
    client.touch()
    context = Context(nats="nats://prod.example:4222", creds=str(admin), subject_prefix="models")
    found = find_bus_outside_replica(store(tmp_path, prod=context), tmp_path)
    assert (found.servers, found.subject_prefix) == (["nats://prod.example:4222"], "models")
    assert found.is_plain, "the admin's credentials are not a client's"
    context = msgspec.structs.replace(context, client_creds=str(client))
    found = find_bus_outside_replica(store(tmp_path, prod=context), tmp_path)
    assert found.credentials == CredentialsFile(str(client))


def test_a_file_of_contexts_that_is_none_is_named(tmp_path: Path) -> None:
    variables = store(tmp_path)
    file = contexts_file(variables)
    assert file is not None
    assert file.stat().st_mode & 0o777 == 0o600
    file.write_text('{"contexts": {"x": {"password": "secret"}}}')
    with pytest.raises(BadField, match="mend or delete") as caught:
        find_stack(StackChoice(), variables, tmp_path)
    assert caught.value.field == str(file)
    with pytest.raises(BadField, match="there are: prod"):
        find_stack(StackChoice(context="pord"), store(tmp_path, prod=Context(nats="x")), tmp_path)
    with pytest.raises(BadField, match="must not both be given"):
        find_stack(StackChoice(context="prod", nats="nats://x"), variables, tmp_path)
