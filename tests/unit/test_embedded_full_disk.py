"""What the supervisor does on a full disk, and what it says."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from structlog.testing import capture_logs

from muster.cli.session import Session
from muster.embedded import run_record as leftovers
from muster.embedded.disk import DiskWatch, describe_full_disk
from muster.embedded.options import CHECKOUT, StackFailed, StatePaths
from muster.embedded.process import Happened, ProcessEvent, ProcessSpec
from muster.embedded.run_record import RunRecord, lock_state, read_record, write_record
from muster.embedded.services import disable_storage
from muster.embedded.stack import EmbeddedStack
from muster.embedded.supervisor import Supervisor, open_log, rotate_at_start, truncate_large_log
from serve_common.errors import StoreUnavailable
from tests.small_disk import SmallDisk


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
            process.kill()
        async with asyncio.timeout(60):
            while supervisor.processes[0].pid in (0, victim) or not supervisor.processes[0].is_ready:  # noqa: ASYNC110 - told by nothing else
                await asyncio.sleep(0.02)
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
