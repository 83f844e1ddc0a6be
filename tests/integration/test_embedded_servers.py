"""`muster up` without its services: the real nats-server and Postgres, supervised; the services are stand-ins."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import asyncpg
import msgspec
import nats
import psutil
import pytest

from muster.embedded import (
    AlreadyRunning,
    EmbeddedStack,
    Happened,
    PortTaken,
    ProcessEvent,
    StackFailed,
    StackOptions,
    StartFailed,
    leftovers,
    postgres,
    running_stack,
)
from muster.embedded import postgres as unprivileged
from muster.embedded.options import CHECKOUT
from muster.embedded.postgres import Way
from muster.embedded.process import ProcessSpec
from muster.embedded.stack import choose_ports
from muster.secrets import NAMES, Secrets
from serve_common.identities.roles import Role
from serve_common.nats.client import connect_nats
from tests.support.identities import bus_settings
from tests.support.servers.reserved_port import ANY_PORTS
from tests.support.stacks.raw_peers import raw_connection

pytestmark = pytest.mark.timeout(300)

ONE_CPU = msgspec.structs.replace(ANY_PORTS, num_cpus=1)
TOLD_LIMIT_S = 50.0
"""Less than a start may take: what cannot get better is not waited for."""
SERVICES = ("controller", "replica-host", "proxy")

# Ready at once; tells its environment.
STAND_IN = """
import json, os, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps(dict(os.environ)).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass

HTTPServer(("127.0.0.1", int(os.environ["MUSTER_OPS_PORT"])), Handler).serve_forever()
"""


def stand_in(spec: ProcessSpec) -> ProcessSpec:
    if spec.name not in SERVICES:
        return spec
    return msgspec.structs.replace(spec, argv=[sys.executable, "-c", STAND_IN])


class Heard:
    """What a stack told."""

    def __init__(self) -> None:
        self.events: list[ProcessEvent] = []
        self.notices: list[str] = []
        self._changed = asyncio.Event()

    def on_event(self, event: ProcessEvent) -> None:
        self.events.append(event)
        self._changed.set()

    async def ready_again(self, name: str, restarts: int, timeout_s: float = 60) -> None:
        async with asyncio.timeout(timeout_s):
            while not any(
                event.name == name and event.happened is Happened.READY and event.restarts >= restarts
                for event in self.events
            ):
                self._changed.clear()
                await self._changed.wait()


def make_stack(
    state: Path,
    heard: Heard,
    options: StackOptions = ONE_CPU,
    substitute: Callable[[ProcessSpec], ProcessSpec] = stand_in,
) -> EmbeddedStack:
    return EmbeddedStack(
        state, options, on_event=heard.on_event, on_notice=heard.notices.append, substitute=substitute
    )


async def connect_postgres(
    stack: EmbeddedStack, password: str | None = None, **options: str
) -> asyncpg.Connection:
    secrets = Secrets(Path(stack.record.secrets))
    return await asyncpg.connect(
        stack.record.postgres_dsn,
        password=password or secrets.read("postgres_password"),
        timeout=30,
        **options,
    )


async def environment_of(stack: EmbeddedStack, name: str) -> dict[str, str]:
    async with raw_connection(stack.record.ops_urls[name]) as (reader, writer):
        writer.write(b"GET / HTTP/1.0\r\n\r\n")
        return json.loads((await reader.read()).partition(b"\r\n\r\n")[2])


def pid_of(stack: EmbeddedStack, name: str) -> int:
    return next(process.pid for process in stack.record.processes if process.name == name)


def mode_of(path: Path) -> int | None:
    return stat.S_IMODE(path.stat().st_mode) if path.exists() else None


def texts_below(directory: Path) -> str:
    return "".join(path.read_text(errors="replace") for path in directory.rglob("*") if path.is_file())


async def test_a_stack_starts_serves_and_is_gone_after_its_stop(tmp_path: Path) -> None:
    heard, state = Heard(), tmp_path / "state"
    async with make_stack(state, heard) as stack:
        record = stack.record
        ready = [event.name for event in heard.events if event.happened is Happened.READY]
        assert sorted(ready) == sorted(["nats", "postgres", *SERVICES])
        assert ready.index("controller") > max(ready.index("nats"), ready.index("postgres"))
        found = running_stack(state)
        assert found is not None
        assert (found.pid, found.nats_url, found.stack_id) == (os.getpid(), record.nats_url, record.stack_id)
        assert {process.name for process in found.processes} == {"nats", "postgres", *SERVICES}
    assert leftovers.find_marked(record.stack_id) == []
    assert running_stack(state) is None
    assert json.loads((state / "run.json").read_bytes())["pid"] == 0
    secrets = Secrets(state / "secrets")
    told = (state / "run.json").read_text() + texts_below(state / "logs") + repr(heard.events)
    assert [name for name in NAMES if secrets.read(name) in told] == []
    assert mode_of(state) == 0o700


async def test_the_controllers_role_owns_its_database_and_nothing_more(tmp_path: Path) -> None:
    async with make_stack(tmp_path / "state", Heard()) as stack:
        connection = await connect_postgres(stack)
        try:
            rights = await connection.fetchrow(
                "SELECT rolsuper, rolcreatedb, rolcreaterole, rolreplication, rolbypassrls FROM pg_roles"
                " WHERE rolname = current_user"
            )
            assert rights is not None
            assert set(rights.values()) == {False}
            await connection.execute("CREATE SCHEMA x")
            assert await connection.fetchval("SHOW data_checksums") == "on"
        finally:
            await connection.close()
        for refused in (
            {"password": "wrong"},
            {"user": "postgres"},
            {"user": "nobody"},
            {"database": "postgres"},
        ):
            with pytest.raises(asyncpg.PostgresError):
                await connect_postgres(stack, **refused)


async def test_the_script_of_composes_postgres_does_the_same_and_can_be_run_again(tmp_path: Path) -> None:
    deploy = CHECKOUT / "deploy/postgres"
    async with make_stack(tmp_path / "state", Heard()) as stack:
        secrets = Secrets(Path(stack.record.secrets))
        connection = await connect_postgres(stack)
        await connection.close()
        secrets.path("postgres_password").write_text("another-password\n")
        script = await asyncio.create_subprocess_exec(
            str(deploy / "10-muster.sh"),
            env={
                "PATH": f"{postgres._binaries()}:{os.environ['PATH']}",
                "PGHOST": "127.0.0.1",
                "PGPORT": str(stack.record.ports["postgres"]),
                "PGPASSWORD": secrets.read("postgres_superuser_password"),
                "POSTGRES_USER": postgres.SUPERUSER,
                "MUSTER_PASSWORD_FILE": str(secrets.path("postgres_password")),
                "MUSTER_BOOTSTRAP_SQL": str(deploy / "bootstrap.sql"),
            },
        )
        assert await script.wait() == 0
        connection = await connect_postgres(stack, password="another-password")
        await connection.close()


async def test_services_get_the_variables_that_compose_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGHOST", "elsewhere.example")
    monkeypatch.setenv("MUSTER_BODY_BYTES_MAX", "77")
    async with make_stack(tmp_path / "state", Heard()) as stack:
        ports, secrets = stack.record.ports, Secrets(tmp_path / "state" / "secrets")
        environments = {name: await environment_of(stack, name) for name in SERVICES}
    for name, variable, file, ops in (
        ("controller", "MUSTER_NATS_CREDS_FILE", "controller.creds", "controller_ops"),
        ("proxy", "MUSTER_NATS_KEYS_FILE", "proxy.keys", "proxy_ops"),
        ("replica-host", "MUSTER_NATS_KEYS_FILE", "host.keys", "host_ops"),
    ):
        given = environments[name]
        assert given["MUSTER_NATS_URL"] == f"nats://127.0.0.1:{ports['nats']}"
        assert given[variable] == str(secrets.path(file))
        assert given["MUSTER_OPS_PORT"] == str(ports[ops])
        assert given["MUSTER_BODY_BYTES_MAX"] == "77"
        assert not any(secrets.read(secret) in given.values() for secret in NAMES)
    assert environments["controller"]["MUSTER_POSTGRES_DSN"] == (
        f"postgresql://muster@127.0.0.1:{ports['postgres']}/muster"
    )
    assert environments["controller"]["MUSTER_POSTGRES_PASSWORD_FILE"] == str(
        secrets.path("postgres_password")
    )
    assert "PGHOST" not in environments["controller"]
    assert environments["replica-host"]["PGHOST"] == "elsewhere.example"
    assert environments["proxy"]["MUSTER_HTTP_PORT"] == str(ports["http"])
    host = environments["replica-host"]
    assert host["MUSTER_NUM_CPUS"] == "1"
    assert len(host["MUSTER_RAY_TEMP_DIR"]) <= 40


async def test_data_and_ports_survive_a_restart(tmp_path: Path) -> None:
    state = tmp_path / "state"
    async with make_stack(state, Heard()) as stack:
        first = stack.record
        connection = await connect_postgres(stack)
        await connection.execute("CREATE TABLE kept AS SELECT 42 AS answer")
        await connection.close()
        client = await connect_nats_as_controller(stack)
        store = await client.jetstream().create_key_value(bucket="serve-snapshots")
        await store.put("endpoints.a.b", b"kept")
        await client.close()
    async with make_stack(state, Heard()) as stack:
        assert stack.record.ports == first.ports
        assert stack.record.stack_id == first.stack_id
        connection = await connect_postgres(stack)
        assert await connection.fetchval("SELECT answer FROM kept") == 42
        await connection.close()
        client = await connect_nats_as_controller(stack)
        store = await client.jetstream().key_value("serve-snapshots")
        assert (await store.get("endpoints.a.b")).value == b"kept"
        await client.close()


async def connect_nats_as_controller(stack: EmbeddedStack) -> nats.NATS:
    settings = bus_settings(Secrets(Path(stack.record.secrets)), stack.record.nats_url, Role.CONTROLLER)
    return await connect_nats(settings, name="test", deadline_s=20.0)


async def test_every_killed_process_comes_back_with_its_data(tmp_path: Path) -> None:
    heard = Heard()
    async with make_stack(tmp_path / "state", heard) as stack:
        connection = await connect_postgres(stack)
        await connection.execute("CREATE TABLE kept AS SELECT 42 AS answer")
        connection.terminate()
        for name in ("postgres", "nats", *SERVICES):
            before = pid_of(stack, name)
            os.kill(before, signal.SIGKILL)
            await heard.ready_again(name, restarts=1)
            assert pid_of(stack, name) != before
        connection = await connect_postgres(stack)
        assert await connection.fetchval("SELECT answer FROM kept") == 42
        await connection.close()
        found = running_stack(tmp_path / "state")
        assert found is not None
        assert [process.restarts for process in found.processes] == [1] * 5


async def test_a_killed_postgres_guardian_does_not_hinder_the_next_postgres(tmp_path: Path) -> None:
    heard = Heard()
    async with make_stack(tmp_path / "state", heard) as stack:
        parent = psutil.Process(pid_of(stack, "postgres")).parent()
        assert parent is not None
        parent.kill()
        await heard.ready_again("postgres", restarts=1)
        connection = await connect_postgres(stack)
        await connection.close()


async def test_one_state_directory_has_one_stack(tmp_path: Path) -> None:
    state = tmp_path / "state"
    async with make_stack(state, Heard()) as stack:
        with pytest.raises(AlreadyRunning, match=str(os.getpid())):
            await make_stack(state, Heard()).start()
        assert all(process.is_ready for process in stack.record.processes)
        assert running_stack(state) is not None


async def test_a_taken_http_port_is_named_and_a_taken_nats_port_replaced(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortTaken, match=f"port {port} "):
            await make_stack(
                tmp_path / "state", Heard(), msgspec.structs.replace(ONE_CPU, http_port=port)
            ).start()
        heard = Heard()
        options = msgspec.structs.replace(ONE_CPU, nats_port=port)
        async with make_stack(tmp_path / "state", heard, options) as stack:
            assert heard.notices == [f"port {port} is taken, so NATS listens on {stack.record.ports['nats']}"]


def test_ports_belong_to_the_stack_from_their_choice_on() -> None:
    chosen = choose_ports(ONE_CPU, {})
    assert len(set(chosen.by_use.values())) == len(chosen.by_use)
    for port in chosen.by_use.values():
        with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
            stranger.bind(("127.0.0.1", port))
        with socket.create_server(("127.0.0.1", port)):  # as all servers do, it sets SO_REUSEADDR
            pass
    for holder in chosen.holders:
        holder.close()


def test_two_stacks_that_start_at_once_have_ports_of_their_own() -> None:
    before = choose_ports(ONE_CPU, {})
    for holder in before.holders:
        holder.close()
    options = msgspec.structs.replace(ONE_CPU, nats_port=before.by_use["nats"])
    one, other = choose_ports(options, before.by_use), choose_ports(options, before.by_use)
    for holder in [*one.holders, *other.holders]:
        holder.close()
    assert one.by_use == before.by_use, "what has ended claims nothing"
    assert set(other.by_use.values()).isdisjoint(one.by_use.values())
    assert other.notices == [f"port {options.nats_port} is taken, so NATS listens on {other.by_use['nats']}"]


async def test_a_service_that_cannot_start_ends_the_whole_start(tmp_path: Path) -> None:
    def broken(spec: ProcessSpec) -> ProcessSpec:
        if spec.name == "controller":
            return msgspec.structs.replace(
                spec, argv=[sys.executable, "-c", "raise SystemExit('no such table')"]
            )
        return stand_in(spec)

    state = tmp_path / "state"
    with pytest.raises(StartFailed, match="controller did not start") as caught:
        await make_stack(state, Heard(), substitute=broken).start()
    assert "no such table" in str(caught.value)
    assert running_stack(state) is None
    assert leftovers.find_marked(json.loads((state / "run.json").read_bytes())["stack_id"]) == []


async def test_foreign_passwords_are_told_at_once(tmp_path: Path) -> None:
    state = tmp_path / "state"
    async with make_stack(state, Heard()):
        pass
    shutil.rmtree(state / "secrets")
    async with asyncio.timeout(TOLD_LIMIT_S):
        with pytest.raises(StackFailed, match="are not those of the database"):
            await make_stack(state, Heard()).start()


async def test_a_lost_controller_password_heals_at_the_next_start(tmp_path: Path) -> None:
    state = tmp_path / "state"
    async with make_stack(state, Heard()):
        pass
    (state / "secrets" / "postgres_password").unlink()
    (state / "secrets" / "controller.creds").unlink()
    async with make_stack(state, Heard()) as stack:
        connection = await connect_postgres(stack)
        await connection.close()
        client = await connect_nats_as_controller(stack)
        await client.close()


async def test_what_a_killed_run_left_behind_is_killed_by_the_next_start(tmp_path: Path) -> None:
    state = tmp_path / "state"
    async with make_stack(state, Heard()) as stack:
        stack_id = stack.record.stack_id
    left = await asyncio.create_subprocess_exec("sleep", "1000", env={"MUSTER_STACK_ID": stack_id})
    heard = Heard()
    async with make_stack(state, heard):
        assert await asyncio.wait_for(left.wait(), timeout=30) != 0
    assert heard.notices == ["killed 1 processes that an earlier run had left behind"]


async def test_a_pid_file_whose_pid_is_another_program_by_now_does_not_hinder_postgres(
    tmp_path: Path,
) -> None:
    state = tmp_path / "state"
    async with make_stack(state, Heard()):
        pass
    pid_file = state / "postgres" / "data" / "postmaster.pid"
    pid_file.write_text(f"{os.getpid()}\n{state / 'postgres' / 'data'}\n0\n5432\n\n\n\n")
    async with make_stack(state, Heard()) as stack:
        connection = await connect_postgres(stack)
        await connection.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has to become somebody else")
@pytest.mark.parametrize("first", [Way.CAPABILITY, Way.NAMESPACE])
@pytest.mark.parametrize("second", [Way.CAPABILITY, Way.NAMESPACE])
async def test_as_root_postgres_runs_in_each_way_and_moves_from_one_to_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: Way, second: Way
) -> None:
    state = tmp_path / "closed" / "state"
    state.parent.mkdir(mode=0o700)  # nobody else can pass it
    real_try = unprivileged._try
    for turn, only in enumerate((first, second)):

        def permit(way: Way, program: Path, directory: Path, only: Way = only) -> None:
            if way is not only:
                raise OSError("forbidden by the test")
            real_try(way, program, directory)

        monkeypatch.setattr(unprivileged, "_try", permit)
        async with make_stack(state, Heard()) as stack:
            connection = await connect_postgres(stack)
            await connection.execute(f"CREATE TABLE kept{turn} ()")
            assert (
                await connection.fetchval("SELECT count(*) FROM pg_tables WHERE tablename LIKE 'kept%'")
                == turn + 1
            )
            await connection.close()


async def test_with_no_way_to_be_another_user_the_reason_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbid(way: Way, program: Path, directory: Path) -> None:
        raise OSError("Operation not permitted")

    monkeypatch.setattr(unprivileged, "_try", forbid)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    with pytest.raises(StackFailed, match="capability: Operation not permitted; namespace: Operation"):
        await make_stack(tmp_path / "state", Heard()).start()


async def test_a_deep_state_directory_gets_a_short_ray_directory_that_goes_with_it(tmp_path: Path) -> None:
    state = tmp_path / ("deep" * 10) / "state"
    async with make_stack(state, Heard()) as stack:
        ray = Path((await environment_of(stack, "replica-host"))["MUSTER_RAY_TEMP_DIR"])
        assert len(str(ray)) <= 40
        assert mode_of(ray) == 0o700
    assert mode_of(ray) is None
