"""Backups: the file, its way in pages, and what a restore makes of the present state."""

from __future__ import annotations

import gzip
import json
import uuid

import msgspec
import pytest

from serve_common.api import commands as c
from serve_common.api.queries import GetBackup
from serve_common.api.views import GoalStatus
from serve_common.errors import BadField, LimitReached, NotFound, ServeError
from serve_common.names import BackendTag, EndpointTag, GoalId
from serve_controller.adapters.backup_file import KINDS, BackupFiles
from serve_controller.core.checkpoint import Checkpoint
from serve_controller.core.commands import decide
from serve_controller.core.commands.restoring import RestoreFrom, check_backup
from serve_controller.core.objects import Counters, ObjectKind, key_of
from serve_controller.core.restored import MARGIN
from serve_controller.shell import admin as backups
from serve_controller.shell.admin import BackupTransfers
from tests.simulation.scenario import application, deploy
from tests.unit.controller_parts import NOW
from tests.unit.test_controller_admin import FakeTerm

FILES = BackupFiles()
DAY = [
    deploy("a", "v1", num=2, request_id="r1"),
    application("v1", "web", "model", request_id="r2"),
    c.CreateBackend(backend_tag="x", replica_config=deploy("x", "v1", num=1, request_id="r").replica_config),
    c.CreateEndpoint(endpoint="e", traffic={"x": 0.5, "a": 0.5}, route="/e"),
    c.ShadowTraffic(endpoint="a", backend_tag="x", proportion=0.5),
    c.SetHttpOptions(options={"request_timeout_s": 5.0}),
]
LATER = [
    c.DeleteEndpoint(endpoint="e"),
    deploy("a", "v2", num=1, request_id="r3", route="/elsewhere"),
    deploy("b", "v1", num=1, request_id="r4", route="/a"),
    c.ShadowTraffic(endpoint="a", backend_tag="x", proportion=0.0),
    c.DeleteBackend(backend_tag="x"),
    application("v2", "web", "cache", request_id="r5"),
    c.SetHttpOptions(options={"request_timeout_s": 9.0}),
]


def done(checkpoint: Checkpoint, *commands: c.AnyCommand) -> Checkpoint:
    for command in commands:
        checkpoint = checkpoint.applied(decide(checkpoint, command, NOW).changes)
    return checkpoint


def saved_of(checkpoint: Checkpoint) -> Checkpoint:
    return FILES.read(FILES.write(checkpoint, 7, NOW))[1]


def wished(checkpoint: Checkpoint) -> dict[str, object]:
    """What users asked for, apart from how often."""
    backends = {tag: b for tag, b in checkpoint.backends.items() if not b.deleting}
    return {
        "backends": {
            tag: (b.target.version, b.target.replica_config, b.target.backend_config)
            for tag, b in backends.items()
        },
        "endpoints": {tag: e.target for tag, e in checkpoint.endpoints.items()},
        "applications": {name: a.target for name, a in checkpoint.applications.items()},
        "deployments": {t: d.application for t, d in checkpoint.deployments.items() if t in backends},
        "http": checkpoint.http and checkpoint.http.target,
    }


def restored(checkpoint: Checkpoint, saved: Checkpoint) -> Checkpoint:
    return checkpoint.applied(decide(checkpoint, RestoreFrom(saved=saved, summary=""), NOW).changes)


# -- the file ----------------------------------------------------------------------------------------------------------


def test_a_file_says_what_it_was_made_of() -> None:
    checkpoint = done(Checkpoint(), *DAY)
    data = FILES.write(checkpoint, 7, NOW)
    taken_at, saved = FILES.read(data)
    kept = {key_of(v): v for v in checkpoint.all_objects() if key_of(v)[0] in KINDS}
    assert (taken_at, {key_of(v): v for v in saved.all_objects()}) == (NOW, kept)
    assert ObjectKind.GOAL not in {kind for kind, _ in kept}
    assert FILES.write(checkpoint, 7, NOW) == data, "the same state gives the same file"
    assert check_backup(saved) == "3 deployments, 1 other backends, 4 endpoints"


def _changed(data: bytes, line: int, **fields: object) -> bytes:
    lines = gzip.decompress(data).splitlines()
    lines[line] = json.dumps({**json.loads(lines[line]), **fields}).encode()
    return gzip.compress(b"\n".join(lines) + b"\n")


def _spoiled() -> dict[str, tuple[bytes, str]]:
    data = FILES.write(done(Checkpoint(), *DAY), 7, NOW)
    text = gzip.decompress(data)
    return {
        "empty": (b"", "header"),
        "something else": (b"PK\x03\x04 a zip", "gzip"),
        "other lines": (gzip.compress(b'{"a": 1}\n'), "header"),
        "half of it": (data[: len(data) // 2], "missing"),
        "without its end": (gzip.compress(b"".join(text.splitlines(keepends=True)[:-1])), "missing"),
        "one byte": (gzip.compress(text.replace(b"/e", b"/f", 1)), "checksum"),
        "newer format": (_changed(data, 0, version=2), "format version 2"),
        "newer schema": (_changed(data, 0, schema_version=99), "schema version 99"),
        "broken packing": (data[:60] + b"\x00" * 40 + data[100:], "is"),
    }


@pytest.mark.parametrize("what", _spoiled())
def test_a_file_that_is_not_whole_is_refused_with_the_reason(what: str) -> None:
    data, why = _spoiled()[what]
    with pytest.raises(BadField, match=why) as refused:
        FILES.read(data)
    assert refused.value.field == "file"


def test_a_file_that_unpacks_to_too_much_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve_controller.adapters.backup_file.TEXT_BYTES_MAX", 100_000)
    with pytest.raises(BadField, match="unpacks to more"):
        FILES.read(gzip.compress(b" " * 1_000_000))


def test_a_backup_that_no_leader_wrote_is_refused() -> None:
    saved = saved_of(done(Checkpoint(), *DAY))
    endpoint = saved.endpoints[EndpointTag("default/e")]
    wrong = msgspec.structs.replace(endpoint.target, traffic={BackendTag("default/nobody"): 1.0})
    saved.endpoints = saved.endpoints.set(
        endpoint.endpoint_tag, msgspec.structs.replace(endpoint, target=wrong)
    )
    with pytest.raises(BadField, match="is not there") as refused:
        check_backup(saved)
    assert refused.value.field == "endpoints[default/e].traffic"


# -- the restore -------------------------------------------------------------------------------------------------------


def test_everything_is_to_be_again_what_it_was() -> None:
    then = done(Checkpoint(), *DAY)
    saved = saved_of(then)
    now = done(then, *LATER)
    assert wished(now) != wished(then)
    after = restored(now, saved)
    assert wished(after) == wished(then)
    assert {g.status for g in after.goals.values() if g.goal_id in now.goals} <= {
        GoalStatus.SUPERSEDED,
        *{g.status for g in now.goals.values() if g.status is not GoalStatus.PENDING},
    }
    assert not set(after.pending) & set(now.goals)
    assert after.backends[BackendTag("default/b")].deleting
    for name in ("goal", "ordinal", "generation", "snapshot"):
        assert getattr(after.counters, name) >= getattr(now.counters, name)
    assert wished(restored(after, saved)) == wished(then), "again comes to the same"


def test_what_is_the_same_is_left_alone() -> None:
    then = done(Checkpoint(), *DAY)
    after = restored(then, saved_of(then))
    for tag, backend in then.backends.items():
        assert after.backends[tag].target == backend.target


def test_another_store_gives_no_number_again_that_the_backup_knows() -> None:
    then = done(Checkpoint(), *DAY)
    after = restored(Checkpoint(), saved_of(then))
    assert wished(after) == wished(then)
    assert all(int(goal_id[1:]) > MARGIN for goal_id in after.goals)
    assert after.counters.ordinal >= MARGIN
    assert then.counters != Counters()


def test_revisions_come_back_with_what_was_gone() -> None:
    then = done(Checkpoint(), *DAY)
    assert restored(Checkpoint(), saved_of(then)).revisions == then.revisions


# -- the way -----------------------------------------------------------------------------------------------------------


class PassingClock:
    time = NOW

    def now(self) -> float:
        return self.time


@pytest.fixture
def desk(monkeypatch: pytest.MonkeyPatch) -> BackupTransfers:
    monkeypatch.setattr(backups, "BACKUP_PAGE_BYTES_MAX", 500)
    return BackupTransfers(FILES, PassingClock())


async def test_pages_are_of_one_moment_whatever_changes_meanwhile(desk: BackupTransfers) -> None:
    then = done(Checkpoint(), *DAY)
    term = FakeTerm(then)
    first = await desk.page(term, GetBackup())
    assert first.pages > 2
    term.checkpoint = done(then, *LATER)
    rest = [
        await desk.page(term, GetBackup(backup_id=first.backup_id, page=n)) for n in range(1, first.pages)
    ]
    assert b"".join(p.data for p in (first, *rest)) == FILES.write(then, term.epoch, NOW)
    with pytest.raises(BadField):
        await desk.page(term, GetBackup(backup_id=first.backup_id, page=first.pages))
    with pytest.raises(NotFound):
        await desk.page(term, GetBackup(backup_id="another", page=0))


async def test_what_is_kept_is_bounded_in_number_and_time(desk: BackupTransfers) -> None:
    term = FakeTerm(done(Checkpoint(), *DAY))
    firsts = [await desk.page(term, GetBackup()) for _ in range(backups.FILES_MAX + 1)]
    with pytest.raises(NotFound):
        await desk.page(term, GetBackup(backup_id=firsts[0].backup_id, page=1))
    PassingClock.time += backups.IDLE_S + 1
    with pytest.raises(NotFound):
        await desk.page(term, GetBackup(backup_id=firsts[-1].backup_id, page=1))


async def sent(desk: BackupTransfers, data: bytes, *, skips: int = -1) -> object:
    parts = [data[n : n + 500] for n in range(0, len(data), 500)]
    upload_id, answer = uuid.uuid4().hex, None
    for number, part in enumerate(parts):
        if number != skips:
            page = c.Restore(upload_id=upload_id, page=number, pages=len(parts), data=part)
            answer = await desk.take(page)
            assert await desk.take(page) is not None, "a retry of a page"
    return answer


async def test_a_file_that_came_whole_is_told_of(desk: BackupTransfers) -> None:
    then = done(Checkpoint(), *DAY)
    answer = await sent(desk, FILES.write(then, 7, NOW))
    assert isinstance(answer, tuple)
    assert "3 deployments" in answer[0]
    assert wished(answer[1]) == wished(then)


async def test_a_page_that_is_missing_is_noticed(desk: BackupTransfers) -> None:
    with pytest.raises(BadField, match="from 0"):
        await sent(desk, FILES.write(done(Checkpoint(), *DAY), 7, NOW), skips=1)


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        ({"pages": 0}, LimitReached),
        ({"pages": 10**9}, LimitReached),
        ({"data": b"x" * 501}, LimitReached),
        ({"page": 1}, BadField),
        ({"page": -1}, BadField),
        ({"upload_id": ""}, BadField),
    ],
)
async def test_an_absurd_page_is_refused(
    desk: BackupTransfers, wrong: dict[str, object], error: type[ServeError]
) -> None:
    page = msgspec.structs.replace(c.Restore(upload_id="u", page=0, pages=1, data=b"x"), **wrong)
    with pytest.raises(error):
        await desk.take(page)


def test_a_goal_of_an_application_covers_its_parts() -> None:
    then = done(Checkpoint(), *DAY)
    after = restored(then, saved_of(then))
    goals = {after.backends[BackendTag(f"shop/{name}")].goal_id for name in ("web", "model")}
    assert len(goals) == 1
    assert after.applications["shop"].goal_id in goals
    assert GoalId("") not in goals
