"""Uploads page by page, what deploys need of them, and what hosts miss."""

from __future__ import annotations

import gzip
from collections.abc import Collection
from typing import Any

import msgspec
import pytest

from muster.cli.backup import named_code as named_in_backup
from serve_common.api.commands import CreateBackend, Deploy, DeployApplication, DeploymentSpec, UploadCode
from serve_common.config.backend import ReplicaConfig
from serve_common.errors import BadField, BusUnavailable, LimitReached, NotFound
from serve_common.protocol.code import PAGE_BYTES_MAX, digest_code, split
from serve_controller.core.checkpoint import Checkpoint
from serve_controller.shell.code_store import UPLOADS_MAX, CodeStore, named_code
from tests.support.controller_parts import backend_of, checkpoint_of, get_version


class Rows:
    """`CodeRows` in memory."""

    def __init__(self) -> None:
        self.pages: dict[tuple[str, int], bytes] = {}
        self.complete: dict[str, int] = {}
        self.unused: set[str] = set()

    async def touch_code(self, digests: Collection[str]) -> set[str]:
        return set(digests) & self.complete.keys()

    async def add_code_page(self, digest: str, page: int, data: bytes) -> None:
        self.pages[digest, page] = data

    async def complete_code(self, digest: str, pages: int) -> None:
        self.complete[digest] = pages

    async def code_pages(self, digest: str) -> int:
        return self.complete.get(digest, 0)

    async def read_code_page(self, digest: str, page: int) -> bytes | None:
        return self.pages.get((digest, page))

    async def trim_code(self, named: Collection[str], unused_s: float) -> list[str]:
        gone = [digest for digest in self.complete if digest in self.unused and digest not in named]
        for digest in gone:
            del self.complete[digest]
        return gone


class Bucket:
    """`CodeBucket` in memory."""

    def __init__(self) -> None:
        self.pages: dict[tuple[str, int], bytes] = {}
        self.is_away = False
        self.puts = 0

    async def has_code(self, digest: str, pages: int) -> bool:
        self._check()
        return all((digest, page) in self.pages for page in range(pages))

    async def put_code_page(self, digest: str, page: int, pages: int, data: bytes) -> None:
        self._check()
        assert page < pages
        self.puts += 1
        self.pages[digest, page] = data

    async def drop_code(self, digest: str) -> None:
        self._check()
        self.pages = {key: data for key, data in self.pages.items() if key[0] != digest}

    def _check(self) -> None:
        if self.is_away:
            raise BusUnavailable("NATS is away")


@pytest.fixture
def rows() -> Rows:
    return Rows()


@pytest.fixture
def bucket() -> Bucket:
    return Bucket()


@pytest.fixture
def store(rows: Rows, bucket: Bucket) -> CodeStore:
    return CodeStore(rows, bucket)


CODE = bytes(range(256)) * (2 * PAGE_BYTES_MAX // 256) + b"end"
DIGEST = digest_code(CODE)
PAGES = split(CODE)


def page(number: int, **changed: Any) -> UploadCode:
    values = {"digest": DIGEST, "page": number, "pages": len(PAGES), "data": PAGES[number], **changed}
    return UploadCode(**values)


async def upload(store: CodeStore, data: bytes = b"code") -> str:
    command = UploadCode(digest=digest_code(data), page=0, pages=1, data=data)
    assert await store.take(command)
    return command.digest


async def test_code_is_complete_with_its_last_page_and_known_from_then_on(
    store: CodeStore, rows: Rows
) -> None:
    assert not await store.take(UploadCode(digest=DIGEST))
    assert [await store.take(page(number)) for number in range(3)] == [False, False, True]
    assert rows.complete == {DIGEST: 3}
    assert b"".join(rows.pages[DIGEST, number] for number in range(3)) == CODE
    assert await store.take(UploadCode(digest=DIGEST))
    assert await store.take(page(0))


async def test_stored_code_is_read_page_by_page(store: CodeStore) -> None:
    for number in range(2):
        await store.take(page(number))
    with pytest.raises(NotFound, match=DIGEST):
        await store.read(DIGEST, 0)
    await store.take(page(2))
    assert [await store.read(DIGEST, number) for number in range(3)] == [(data, 3) for data in PAGES]
    with pytest.raises(BadField, match="0 to 2"):
        await store.read(DIGEST, 3)


async def test_retries_and_a_second_upload_of_the_same_code_do_no_harm(store: CodeStore, rows: Rows) -> None:
    for number in (0, 0, 1, 0, 1):
        assert not await store.take(page(number))
    assert await store.take(page(2))
    assert rows.complete == {DIGEST: 3}


@pytest.mark.parametrize(
    ("command", "error", "text"),
    [
        (UploadCode(digest="abc"), BadField, "64 lower-case"),
        (page(1), BadField, "from 0"),
        (page(0, page=3), BadField, "0 to 2"),
        (page(0, page=-1), BadField, "0 to 2"),
        (page(0, pages=10**6), LimitReached, "at most"),
        (page(0, pages=-1), LimitReached, "at most"),
        (page(0, data=b"short"), LimitReached, "pages but the last"),
        (page(0, data=bytes(PAGE_BYTES_MAX + 1)), LimitReached, "pages but the last"),
    ],
)
async def test_bad_pages_are_refused(
    store: CodeStore, rows: Rows, command: UploadCode, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        await store.take(command)
    assert not rows.complete


async def test_code_that_is_not_what_its_digest_says_is_never_complete(store: CodeStore, rows: Rows) -> None:
    with pytest.raises(BadField, match=digest_code(b"other")):
        await store.take(UploadCode(digest=DIGEST, page=0, pages=1, data=b"other"))
    assert not rows.complete
    assert [await store.take(page(number)) for number in range(3)] == [False, False, True]


async def test_the_number_of_uploads_in_progress_is_bounded(store: CodeStore) -> None:
    first = bytes(PAGE_BYTES_MAX)
    for number in range(UPLOADS_MAX + 1):
        assert not await store.take(UploadCode(digest=f"{number:064x}", page=0, pages=2, data=first))
    with pytest.raises(BadField, match="from 0"):  # the one begun first was dropped
        await store.take(UploadCode(digest=f"{0:064x}", page=1, pages=2, data=b"x"))


def commands(digest: str) -> list[Any]:
    config = ReplicaConfig(import_path="m:C", code=digest)
    return [
        Deploy(name="a", replica_config=config),
        CreateBackend(backend_tag="a", replica_config=config),
        DeployApplication(
            name="a", ingress="b", deployments=[DeploymentSpec(name="b", replica_config=config)]
        ),
    ]


async def test_what_a_deploy_names_must_be_there_and_is_published(store: CodeStore, bucket: Bucket) -> None:
    for command, field in zip(
        commands(DIGEST), ("replica_config", "replica_config", "deployments[0].replica_config"), strict=True
    ):
        with pytest.raises(BadField) as raised:
            await store.prepare(command)
        assert raised.value.field == f"{field}.code"
    digest = await upload(store)
    for command in commands(digest):
        await store.prepare(command)
    assert bucket.pages == {(digest, 0): b"code"}
    assert bucket.puts == 1


async def test_archives_are_needed_and_published_as_code_is(store: CodeStore, bucket: Bucket) -> None:
    digests = [await upload(store, data) for data in (b"code", b"dir", b"one", b"two")]
    config = ReplicaConfig(
        import_path="m:C", code=digests[0], working_dir=digests[1], py_modules=(digests[2], digests[3])
    )
    await store.prepare(Deploy(name="a", replica_config=config))
    assert {digest for digest, _ in bucket.pages} == set(digests)
    lacking = msgspec.structs.replace(config, py_modules=(digests[2], DIGEST))
    with pytest.raises(BadField, match="upload the code first") as raised:
        await store.prepare(Deploy(name="a", replica_config=lacking))
    assert raised.value.field == "replica_config.py_modules[1]"


async def test_a_deploy_goes_on_while_the_bus_is_away_and_hosts_get_the_code_later(
    store: CodeStore, bucket: Bucket
) -> None:
    digest = await upload(store)
    bucket.is_away = True
    await store.prepare(commands(digest)[0])
    bucket.is_away = False
    await store.publish([digest])
    assert bucket.pages == {(digest, 0): b"code"}
    bucket.pages.clear()  # it was lost
    await store.publish([digest])
    assert not bucket.pages
    await store.publish([digest], again=True)
    assert bucket.pages == {(digest, 0): b"code"}


async def test_unused_code_that_nothing_names_is_deleted(
    store: CodeStore, rows: Rows, bucket: Bucket
) -> None:
    kept, gone = await upload(store, b"kept"), await upload(store, b"gone")
    await store.publish([kept, gone])
    rows.unused = {gone}
    await store.trim(Checkpoint())
    assert rows.complete == {kept: 1}
    assert {digest for digest, _ in bucket.pages} == {kept}


async def test_code_of_policies_is_needed_and_named_as_that_of_replicas_is(store: CodeStore) -> None:
    policy = {"policy_function": "__main__:f", "code": "5" * 64}
    version = get_version(1, autoscaling_config={"max_replicas": 2, "policy": policy})
    checkpoint = checkpoint_of(backend_of(version))
    assert named_code(checkpoint) == {"5" * 64}
    rows = [msgspec.json.encode({"value": msgspec.to_builtins(version)})]
    assert named_in_backup(gzip.compress(b"\n".join(rows))) == {"5" * 64}
    command = CreateBackend(
        backend_tag="a", replica_config=version.replica_config, backend_config=version.backend_config
    )
    with pytest.raises(BadField) as refused:
        await store.prepare(command)
    assert refused.value.field == "backend_config.autoscaling_config.policy.code"
