"""The supervisor with real processes: nothing stays dead, and nothing stays behind."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import psutil
import pytest
import typer
from structlog.testing import capture_logs

from muster.cli.session import Session
from muster.embedded import leftovers
from muster.embedded.disk import DiskWatch
from muster.embedded.options import CHECKOUT, StackFailed, StackOptions, StartFailed, StatePaths
from muster.embedded.process import Happened, ProcessEvent, ProcessSpec
from muster.embedded.run_record import (
    RunRecord,
    describe_full_disk,
    lock_state,
    read_record,
    write_record,
)
from muster.embedded.services import ServiceSpecs, disable_storage
from muster.embedded.stack import EmbeddedStack, choose_ports
from muster.embedded.supervisor import Supervisor, last_lines, open_log, rotate_at_start, truncate_large_log
from muster.secrets import Secrets
from serve_common.errors import StoreUnavailable
from serve_common.runtime.settings import Environment
from serve_console.settings import read_settings as read_console_settings
from serve_replica_host.settings import read_host_settings
from tests.support.servers.reserved_port import ANY_PORTS
from tests.support.servers.small_disk import SmallDisk
from tests.support.waiting import eventually

SLEEPER = ["/bin/sh", "-c", "echo up; exec sleep 1000"]
# Leaves its session, cleans its environment, and is an orphan at once: as hard to find as Ray's workers get.
WITH_DAEMON = ["/bin/sh", "-c", "(setsid env -i sleep 1001 & echo $! > daemon.pid); exec sleep 1000"]


class Stage:
    """A supervisor under test, and what it said."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.stack_id = uuid.uuid4().hex
        self.events: list[ProcessEvent] = []
        self.supervisor: Supervisor | None = None
        self._heard = asyncio.Event()

    def spec(self, name: str, argv: list[str] = SLEEPER, **options: object) -> ProcessSpec:
        return ProcessSpec(
            name=name,
            argv=argv,
            env={"PATH": os.environ["PATH"]},
            cwd=self.directory,
            log_path=self.directory / "logs" / f"{name}.log",
            **options,
        )

    async def start(self, *specs: ProcessSpec) -> Supervisor:
        self.supervisor = Supervisor(self.stack_id, specs, self._on_message)
        await self.supervisor.start()
        return self.supervisor

    def _on_message(self, event: ProcessEvent) -> None:
        self.events.append(event)
        self._heard.set()

    async def until(self, condition: Callable[[], object], timeout_s: float = 40) -> None:
        async with asyncio.timeout(timeout_s):
            while not condition():
                self._heard.clear()
                await self._heard.wait()

    def said(self, happened: Happened, name: str | None = None) -> list[ProcessEvent]:
        return [event for event in self.events if event.happened is happened and name in (None, event.name)]

    def pid(self, name: str) -> int:
        assert self.supervisor is not None
        return next(process.pid for process in self.supervisor.processes if process.name == name)


@pytest.fixture
async def stage(tmp_path: Path) -> AsyncIterator[Stage]:
    made = Stage(tmp_path)
    yield made
    if made.supervisor is not None:
        await made.supervisor.stop()
    assert leftovers.find_marked(made.stack_id) == []


async def gone(pid: int, timeout_s: float = 40) -> bool:
    """Whether the process ends in time."""
    give_up_at = time.monotonic() + timeout_s
    while time.monotonic() < give_up_at:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        await asyncio.sleep(0.01)  # another's process has no event for us
    return False


def content(path: Path) -> str:
    return path.read_text().strip() if path.exists() else ""


async def written(path: Path, timeout_s: float = 40) -> str:
    """What a process of the stage writes there."""
    give_up_at = time.monotonic() + timeout_s
    while time.monotonic() < give_up_at:
        if text := content(path):
            return text
        await asyncio.sleep(0.01)  # a file has no event for us
    raise AssertionError(f"nothing was written to {path}")


async def test_processes_start_in_order_and_stop_in_reverse(stage: Stage) -> None:
    supervisor = await stage.start(
        stage.spec("a"), stage.spec("b", depends_on=("a",)), stage.spec("c", depends_on=("a", "b"))
    )
    assert [event.name for event in stage.said(Happened.READY)] == ["a", "b", "c"]
    assert all(process.is_ready for process in supervisor.processes)
    assert all(psutil.pid_exists(stage.pid(name)) for name in "abc")
    await supervisor.stop()
    assert [event.name for event in stage.said(Happened.STOPPED)] == ["c", "b", "a"]
    assert [process.pid for process in supervisor.processes] == [0, 0, 0]


async def test_what_depends_on_a_process_waits_until_that_is_ready(stage: Stage) -> None:
    answers = iter(["not yet", "not yet", None])

    async def probe() -> str | None:
        assert stage.said(Happened.STARTED, "b") == []
        return next(answers)

    await stage.start(stage.spec("a", ready=probe), stage.spec("b", depends_on=("a",)))
    assert list(answers) == []


async def test_a_killed_process_is_started_again_at_once(stage: Stage) -> None:
    await stage.start(stage.spec("a"))
    first = stage.pid("a")
    os.kill(first, signal.SIGKILL)
    await stage.until(lambda: len(stage.said(Happened.READY, "a")) == 2)
    assert stage.pid("a") != first
    [died] = stage.said(Happened.DIED)
    assert died.pid == first
    assert "killed by SIGKILL" in died.detail
    assert died.detail.endswith(" in 0.0 s")


async def test_a_crash_loop_is_slowed_down_and_ends_when_the_cause_does(stage: Stage) -> None:
    broken = stage.directory / "broken"
    script = f"test -e {broken} && exit 3; echo 1 > alive; exec sleep 1000"
    await stage.start(stage.spec("a", ["/bin/sh", "-c", script], restart_backoff_max_s=0.3))
    await written(stage.directory / "alive")
    broken.touch()
    os.kill(stage.pid("a"), signal.SIGKILL)
    await stage.until(lambda: len(stage.said(Happened.DIED)) >= 4)
    assert [event.detail.rpartition(" in ")[2] for event in stage.said(Happened.DIED)][:4] == [
        "0.0 s",
        "0.2 s",
        "0.3 s",
        "0.3 s",
    ]
    broken.unlink()
    last = stage.said(Happened.DIED)[-1]
    await stage.until(lambda: stage.said(Happened.READY)[-1].restarts > last.restarts)


async def test_what_a_dead_process_leaves_behind_is_killed_before_it_starts_again(stage: Stage) -> None:
    left: list[int] = []

    def before_start() -> None:
        left.extend(pid for pid in daemons if psutil.pid_exists(pid))

    daemons: list[int] = []
    await stage.start(stage.spec("a", WITH_DAEMON, before_start=before_start))
    daemons.append(int(await written(stage.directory / "daemon.pid")))
    assert psutil.pid_exists(daemons[0])
    os.kill(stage.pid("a"), signal.SIGKILL)
    await stage.until(lambda: len(stage.said(Happened.READY, "a")) == 2)
    assert left == []
    assert not psutil.pid_exists(daemons[0])


async def test_stopping_leaves_no_daemon_and_no_zombie(stage: Stage) -> None:
    others = set(psutil.Process().children())  # such as servers that other tests of the session share
    supervisor = await stage.start(stage.spec("a", WITH_DAEMON))
    daemon = int(await written(stage.directory / "daemon.pid"))
    before = set(psutil.Process().children()) - others
    assert before
    await supervisor.stop()
    assert not psutil.pid_exists(daemon)
    assert all(not child.is_running() for child in before)


async def test_a_killed_guardian_takes_its_process_with_it_and_both_come_back(stage: Stage) -> None:
    await stage.start(stage.spec("a"), stage.spec("b"))
    first, other = stage.pid("a"), stage.pid("b")
    guardian = psutil.Process(first).parent()
    assert guardian is not None
    guardian.kill()
    await stage.until(lambda: len(stage.said(Happened.READY, "a")) == 2)
    assert await gone(first)
    assert stage.pid("b") == other


async def test_a_process_that_ignores_sigterm_is_killed(stage: Stage) -> None:
    stubborn = ["/bin/sh", "-c", "trap '' TERM; echo 1 > deaf; while :; do sleep 0.05; done"]
    supervisor = await stage.start(stage.spec("a", stubborn, stop_timeout_s=0.3))
    await written(stage.directory / "deaf")
    began = time.monotonic()
    await supervisor.stop()
    assert 0.25 < time.monotonic() - began < 30


async def test_the_whole_stop_has_a_deadline(stage: Stage) -> None:
    stubborn = ["/bin/sh", "-c", "trap '' TERM; while :; do sleep 0.05; done"]
    supervisor = await stage.start(*(stage.spec(name, stubborn, stop_timeout_s=60) for name in "abc"))
    began = time.monotonic()
    await supervisor.stop(timeout_s=0.5)
    assert time.monotonic() - began < 40


async def test_the_chosen_signal_is_sent(stage: Stage) -> None:
    script = "trap 'echo got INT > got; exit 0' INT; echo 1 > armed; while :; do sleep 0.02; done"
    supervisor = await stage.start(stage.spec("a", ["/bin/sh", "-c", script], stop_signal=signal.SIGINT))
    await written(stage.directory / "armed")
    await supervisor.stop()
    assert (stage.directory / "got").read_text() == "got INT\n"


async def never() -> str | None:
    return "its port is closed"


async def test_a_process_that_fails_to_start_is_named_with_the_end_of_its_log(stage: Stage) -> None:
    with pytest.raises(StartFailed, match="a did not start") as caught:
        await stage.start(
            stage.spec("a", ["/bin/sh", "-c", "echo the port is taken; exit 7"], ready=never), stage.spec("b")
        )
    assert "exited with code 7" in str(caught.value)
    assert "the port is taken" in str(caught.value)
    assert leftovers.find_marked(stage.stack_id) == []


async def test_a_program_that_does_not_exist_is_named(stage: Stage) -> None:
    with pytest.raises(StartFailed, match="/no/such/program cannot be executed"):
        await stage.start(stage.spec("a", ["/no/such/program"], ready=never))


async def test_a_process_that_never_gets_ready_is_named_with_the_reason(stage: Stage) -> None:
    with pytest.raises(StartFailed, match="its port is closed"):
        await stage.start(stage.spec("a", ready=never, ready_timeout_s=0.3))


async def test_a_failing_probe_ends_the_start(stage: Stage) -> None:
    async def probe() -> str | None:
        raise RuntimeError("broken probe")

    with pytest.raises(RuntimeError, match="broken probe"):
        await stage.start(stage.spec("a", ready=probe))


async def test_stopping_during_the_start_leaves_nothing(stage: Stage) -> None:
    starting = asyncio.gather(stage.start(stage.spec("a", ready=never), stage.spec("b", depends_on=("a",))))
    await stage.until(lambda: stage.said(Happened.STARTED))
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert stage.supervisor is not None
    await stage.supervisor.stop()
    assert leftovers.find_marked(stage.stack_id) == []


@pytest.mark.timeout(120)
def test_nothing_survives_a_killed_supervisor(tmp_path: Path) -> None:
    stack_id = uuid.uuid4().hex
    script = textwrap.dedent(f"""
        import asyncio, os, signal
        from pathlib import Path
        from muster.embedded.process import ProcessSpec
        from muster.embedded.supervisor import Supervisor

        async def main():
            here = Path({str(tmp_path)!r})
            specs = [
                ProcessSpec(name=str(n), argv=argv, env=dict(os.environ), cwd=here, log_path=here / str(n))
                for n, argv in enumerate([{WITH_DAEMON!r}, {SLEEPER!r}])
            ]
            supervisor = Supervisor({stack_id!r}, specs, lambda event: None)
            await supervisor.start()
            while not (here / "daemon.pid").exists() or not (here / "daemon.pid").read_text():
                await asyncio.sleep(0.01)
            print(*(process.pid for process in supervisor.processes), flush=True)
            os.kill(os.getpid(), signal.SIGKILL)

        asyncio.run(main())
    """)
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    pids = [*map(int, ended.stdout.split()), int((tmp_path / "daemon.pid").read_text())]
    assert len(pids) == 3
    give_up_at = time.monotonic() + 40
    while left := [*filter(psutil.pid_exists, pids), *leftovers.find_marked(stack_id)]:
        assert time.monotonic() < give_up_at, left
        time.sleep(0.01)  # they are nobody's children whose end could be awaited


def test_only_marked_processes_are_killed(tmp_path: Path) -> None:
    ours, theirs = uuid.uuid4().hex, uuid.uuid4().hex
    marked = [{"MUSTER_STACK_ID": stack_id, "MUSTER_PROCESS": "a"} for stack_id in (ours, theirs)]
    started = [subprocess.Popen(["sleep", "60"], env=env) for env in (*marked, {})]
    try:
        assert leftovers.kill_marked(ours) == 1
        assert [process.poll() is None for process in started] == [False, True, True]
        assert leftovers.kill_marked(theirs, "b") == 0
        assert started[1].poll() is None
    finally:
        for process in started:
            process.kill()
            process.wait()


def test_a_long_log_is_cut_while_its_writer_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    with path.open("ab", buffering=0) as writer:
        writer.write(b"x" * 100)
        assert not truncate_large_log(path, size_max=100)
        writer.write(b"y")
        assert truncate_large_log(path, size_max=100)
        writer.write(b"new\n")
    assert path.read_bytes() == b"new\n"
    assert (tmp_path / "a.log.1").read_bytes() == b"x" * 100 + b"y"


def test_a_new_run_keeps_the_last_ones_log_beside_its_own(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "a.log"
    rotate_at_start(path)
    path.write_text("first\n")
    rotate_at_start(path)
    assert not path.exists()
    assert path.with_name("a.log.1").read_text() == "first\n"


def test_the_end_of_a_log_is_quoted_within_limits(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    assert "cannot be read" in last_lines(path)
    path.write_text("")
    assert last_lines(path) == "(its log is empty)"
    path.write_text("".join(f"line {number}\n" for number in range(1000)) + "z" * 1000)
    quoted = last_lines(path, count=3)
    assert quoted.splitlines()[0] == "line 998"
    assert len(quoted.splitlines()[-1]) == 300


# What the services of the embedded stack are told.


PORTS = dict.fromkeys(
    (
        *("nats", "nats_monitor", "postgres", "http", "controller_ops", "host_ops", "proxy_ops"),
        *("console", "console_ops"),
    ),
    1,
)


def specs(root: Path, options: StackOptions | None = None) -> ServiceSpecs:
    paths = StatePaths(root)
    return ServiceSpecs(paths, options or StackOptions(), Secrets(paths.secrets), PORTS, paths.ray)


def test_bytecode_goes_to_the_state_directory_where_it_may_not_lie_beside_the_sources(tmp_path: Path) -> None:
    for spec in specs(tmp_path).all({"PYTHONDONTWRITEBYTECODE": "1", "PATH": "/bin"}):
        assert "PYTHONDONTWRITEBYTECODE" not in spec.env
        assert spec.env["PYTHONPYCACHEPREFIX"] == str(tmp_path / "bytecode")
        assert spec.env["PATH"] == "/bin"


def test_otherwise_bytecode_lies_where_python_puts_it(tmp_path: Path) -> None:
    assert all("PYTHONPYCACHEPREFIX" not in spec.env for spec in specs(tmp_path).all({"PATH": "/bin"}))


def test_the_proxy_is_told_how_many_processes_share_its_port(tmp_path: Path) -> None:
    for options, expected in ((None, "1"), (StackOptions(proxy_processes=4), "4")):
        envs = [spec.env for spec in specs(tmp_path, options).all({})]
        assert [env["MUSTER_PROXY_PROCESSES"] for env in envs if "MUSTER_PROXY_PROCESSES" in env] == [
            expected
        ]


def test_middlewares_are_looked_for_beside_the_applications_unless_told(tmp_path: Path) -> None:
    for environment, expected in (({}, str(Path.cwd())), ({"MUSTER_MIDDLEWARE_DIR": "/own"}, "/own")):
        [proxy] = [spec for spec in specs(tmp_path).all(environment) if spec.name == "proxy"]
        assert proxy.env["MUSTER_MIDDLEWARE_DIR"] == expected


def test_the_controller_alone_is_told_where_nats_shows_its_state(tmp_path: Path) -> None:
    told = {spec.name: spec.env.get("MUSTER_NATS_MONITOR_URL") for spec in specs(tmp_path).all({})}
    assert told == {"controller": "http://127.0.0.1:1", "replica-host": None, "proxy": None}


def test_replicas_of_another_user_have_their_places_outside_the_state_directory(tmp_path: Path) -> None:
    def of_host(root: Path, environment: dict[str, str]) -> dict[str, str]:
        return dict(next(spec.env for spec in specs(root).all(environment) if spec.name == "replica-host"))

    same = of_host(tmp_path, {})
    assert same["MUSTER_RAY_TEMP_DIR"] == str(tmp_path / "ray")
    assert same["PROMETHEUS_MULTIPROC_DIR"] == str(tmp_path / "metrics")
    assert same["MUSTER_STATE_DIR"] == str(tmp_path)
    other = of_host(tmp_path, {"MUSTER_REPLICA_USER": "nobody"})
    told = {"MUSTER_NATS_PASSWORD": "a", "MUSTER_NATS_PASSWORD_FILE": "", "MUSTER_REPLICA_NATS_PASSWORD": "b"}
    settings = read_host_settings(Environment(other | told | {"MUSTER_REPLICA_NATS_PASSWORD_FILE": ""}))
    assert settings.metrics_dir.startswith(settings.own_dir)
    assert str(tmp_path) not in settings.own_dir + settings.ray_temp_dir
    assert not other["MUSTER_STATE_DIR"]
    assert (
        other["MUSTER_RAY_TEMP_DIR"]
        != of_host(tmp_path / "b", {"MUSTER_REPLICA_USER": "nobody"})["MUSTER_RAY_TEMP_DIR"]
    )


# What the supervisor does on a full disk, and what it says.


@pytest.fixture
def disk() -> Iterator[SmallDisk]:
    with SmallDisk.mounted(8) as disk:
        yield disk


def record(root: Path) -> RunRecord:
    return RunRecord(
        stack_id="id",
        state_dir=str(root),
        pid=1,
        nats_url="nats://127.0.0.1:1",
        nats_monitor_url="",
        http_url="",
        postgres_dsn="",
        secrets="",
        ports={},
        ops_urls={},
    )


def test_a_full_disk_is_named_and_one_with_room_is_not(disk: SmallDisk) -> None:
    assert describe_full_disk(disk.root) is None
    disk.fill()
    assert describe_full_disk(disk.root) == f"the disk of {disk.root} is full (0 KiB free); make room there"
    assert describe_full_disk(disk.root / "not there") is None
    disk.free()
    assert describe_full_disk(disk.root) is None


def test_a_long_log_is_given_up_where_it_cannot_be_kept(disk: SmallDisk) -> None:
    log = disk.root / "x.log"
    log.write_bytes(b"line\n" * 300_000)
    disk.fill()

    with capture_logs() as logs:
        assert truncate_large_log(log, size_max=1024 * 1024)

    assert [line["event"] for line in logs] == ["log_not_kept"]
    assert log.stat().st_size == 0
    assert not (disk.root / "x.log.1").exists()
    assert disk.free_bytes >= 1_000_000


def test_a_log_that_cannot_be_opened_keeps_nothing_from_starting(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "x.log"
    with capture_logs() as logs:
        rotate_at_start(path)
        with open_log(path) as opened:
            opened.write(b"nowhere")
    assert [line["event"] for line in logs] == ["log_not_rotated", "log_not_opened"]


async def test_a_process_whose_log_is_on_a_full_disk_is_kept_running(disk: SmallDisk) -> None:
    events: list[ProcessEvent] = []
    spec = ProcessSpec(
        name="talker",
        argv=["/bin/sh", "-c", "while :; do echo said; sleep 0.01; done"],
        env={"PATH": "/usr/bin:/bin"},
        cwd=Path("/"),
        log_path=disk.root / "logs" / "talker.log",
    )
    supervisor = Supervisor(f"full-{disk.root.name}", [spec], events.append)
    await supervisor.start()
    try:
        disk.fill()
        victim = supervisor.processes[0].pid
        killed = leftovers.find_marked(f"full-{disk.root.name}", "talker")
        for process in killed:
            with suppress(psutil.NoSuchProcess):  # one of the sleeps has ended by itself
                process.kill()
        await eventually(
            lambda: supervisor.processes[0].pid not in (0, victim) and supervisor.processes[0].is_ready,
            within_s=60,
        )
    finally:
        await supervisor.stop()
    died = next(event for event in events if event.happened is Happened.DIED)
    assert f"the disk of {disk.root / 'logs'} is full" in died.detail


def test_a_record_that_cannot_be_written_leaves_the_last_one_whole(disk: SmallDisk) -> None:
    paths = StatePaths(disk.root)
    write_record(paths, record(disk.root))
    disk.fill()
    with pytest.raises(OSError, match="No space left"):
        write_record(paths, record(disk.root / ("long" * 3000)))
    assert read_record(paths) == record(disk.root)


async def test_a_start_on_a_full_disk_names_it(disk: SmallDisk) -> None:
    disk.fill()
    with pytest.raises(StackFailed, match=f"the disk of {disk.root / 's'} is full"):
        await EmbeddedStack(disk.root / "s").start()
    disk.free()
    lock_state(StatePaths(disk.root / "s")).close()


def test_storage_is_switched_off_in_the_configuration_that_is_used() -> None:
    whole = (CHECKOUT / "deploy" / "nats" / "nats.conf").read_text()
    changed = disable_storage(whole)
    assert (
        changed.splitlines()[: whole[: whole.index("\njetstream")].count("\n")]
        == whole.splitlines()[: whole[: whole.index("\njetstream")].count("\n")]
    )
    assert set(changed.splitlines()) - set(whole.splitlines()) == {"  enabled: false"}


async def test_a_server_never_reads_half_a_configuration_whatever_becomes_of_the_reload(
    disk: SmallDisk,
) -> None:
    config = disk.root / "nats.conf"
    whole = (CHECKOUT / "deploy" / "nats" / "nats.conf").read_text()
    config.write_text(whole)
    seen: list[str] = []

    def nats_pid() -> int:
        seen.append(config.read_text())
        return 0

    watch = DiskWatch(disk.root, config, 1, nats_pid, lambda _text: None)
    await watch._reopen_storage()
    assert seen == [disable_storage(whole), whole]
    disk.fill()
    with pytest.raises(OSError, match="No space left"):
        await watch._reopen_storage()
    assert config.read_text() == whole
    assert len(seen) == 2


def test_a_command_that_fails_for_a_while_names_the_full_disk(
    disk: SmallDisk, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = StatePaths(disk.root)
    write_record(paths, record(disk.root))
    held = lock_state(paths)
    disk.fill()
    session = Session(environment={"MUSTER_STATE_DIR": str(disk.root)}, directory=Path("/"))
    try:
        with pytest.raises(typer.Exit), session.reporting(as_json=False):
            raise StoreUnavailable("Postgres does not answer")
    finally:
        held.close()
    told = capsys.readouterr().err
    assert "Postgres does not answer" in told
    assert f"the disk of {disk.root} is full" in told


def test_without_a_proxy_nothing_listens_for_http(tmp_path: Path) -> None:
    names = [spec.name for spec in specs(tmp_path, StackOptions(has_proxy=False)).all({})]
    assert names == ["controller", "replica-host"]


def test_the_console_starts_last_stops_first_waits_for_nothing_and_has_no_identity(tmp_path: Path) -> None:
    console = specs(tmp_path, StackOptions(has_console=True)).all({"MUSTER_NATS_CREDS_FILE": "/admin.creds"})[
        -1
    ]
    assert (console.name, console.depends_on) == ("console", ())
    assert console.env["MUSTER_CONSOLE_USERS_FILE"] == str(tmp_path / "secrets" / "console_users.json")
    assert [name for name in console.env if name.startswith("MUSTER_NATS_")] == ["MUSTER_NATS_URL"]
    settings = read_console_settings(Environment(console.env))
    assert (settings.http_host, settings.http_port, settings.apps_dir) == ("127.0.0.1", 1, str(Path.cwd()))
    assert "console" not in [spec.name for spec in specs(tmp_path).all({})]


def test_a_console_whose_port_is_taken_gets_another_and_it_is_said() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        options = msgspec.structs.replace(ANY_PORTS, has_console=True, console_port=port, console_ops_port=0)
        chosen = choose_ports(options, {})
    for holder in chosen.holders:
        holder.close()
    assert chosen.by_use["console"] not in (0, port)
    assert chosen.notices == [f"port {port} is taken, so the console listens on {chosen.by_use['console']}"]
    assert "console" not in choose_ports_closed(ANY_PORTS)


def choose_ports_closed(options: StackOptions) -> dict[str, int]:
    chosen = choose_ports(options, {})
    for holder in chosen.holders:
        holder.close()
    return chosen.by_use


async def test_what_is_not_awaited_neither_delays_nor_fails_a_start_and_says_that_it_stays_away(
    tmp_path: Path,
) -> None:
    def spec(name: str, script: str, *, is_awaited: bool) -> ProcessSpec:
        return ProcessSpec(
            name=name,
            argv=["/bin/sh", "-c", script],
            env={"PATH": "/usr/bin:/bin"},
            cwd=Path("/"),
            log_path=tmp_path / f"{name}.log",
            is_awaited=is_awaited,
            restart_backoff_min_s=0.01,
            restart_backoff_max_s=0.02,
            ready=None if is_awaited else never_ready,
        )

    async def never_ready() -> str | None:
        return "never"

    events: list[ProcessEvent] = []
    supervisor = Supervisor(
        f"optional-{tmp_path.name}",
        [
            spec("needed", "exec sleep 60", is_awaited=True),
            spec("slow", "exec sleep 60", is_awaited=False),
            spec("broken", "exit 2", is_awaited=False),
        ],
        events.append,
    )
    await supervisor.start()
    try:
        await eventually(
            lambda: any(event.name == "broken" and "it stays away" in event.detail for event in events)
        )
        assert [process.is_ready for process in supervisor.processes] == [True, False, False]
    finally:
        await supervisor.stop()
