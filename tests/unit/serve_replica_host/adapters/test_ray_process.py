"""What a Ray runtime that user code has taken over can do to its host: lie about its replicas, and end."""

from __future__ import annotations

import asyncio
import os
import pickle
import random
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
import pytest

from serve_common.config.backend import ReplicaConfig
from serve_common.identities.credentials import UserIdentity
from serve_common.names import ReplicaTag
from serve_common.protocol.reports import ReplicaGoal
from serve_common.runtime.settings import BusSettings
from serve_common.runtime.tasks import TaskOwner
from serve_replica_host.adapters import ray_process
from serve_replica_host.adapters.ray_process import RayProcess, runtime_environment
from serve_replica_host.adapters.ray_protocol import (
    NOTICE_BYTES_MAX,
    Call,
    CheckHealth,
    Close,
    Drain,
    Kill,
    KillByForce,
    Notice,
    Open,
    OpenFailed,
    RayProtocolError,
    RaySettings,
    RayUnavailable,
    Reconfigure,
    Renew,
    Resources,
    Start,
    decode_call,
    decode_notice,
    encode,
)
from serve_replica_host.adapters.ray_service import bounded
from serve_replica_host.core.events import (
    TEXT_LENGTH_MAX,
    Constructed,
    Drained,
    HealthChecked,
    Placed,
    ProcessEnded,
    Reconfigured,
    ReplicaEvent,
    ReplicaStartFailed,
    Waits,
)
from tests.support.replica_rig import build_goal
from tests.support.waiting import eventually

TAG = ReplicaTag("default/app#1")
SETTINGS = RaySettings(
    temp_dir="/tmp/ray",
    address=None,
    num_cpus=1,
    app_root="/",
    metrics_dir="/tmp/metrics",
    host_id="host-1",
    spare_replicas=0,
)
BUS = BusSettings(
    servers=["nats://127.0.0.1:1"],
    user="replica default/app#1",
    credentials=UserIdentity(jwt="a.b.c", seed="SU", expires_at=1.5),
    inbox_prefix="_INBOX_replica.default.app.1",
    subject_prefix="serve",
)
NOTICES: list[Notice] = [
    Placed(TAG, 7, True, "abc-7", "10.0.0.2"),
    Waits(TAG, "it needs 4 CPU"),
    Constructed(TAG, 3),
    ReplicaStartFailed(TAG, "no such model"),
    Reconfigured(TAG, 4, None),
    HealthChecked(TAG, "no disk"),
    Drained(TAG),
    ProcessEnded(TAG, "killed"),
    Resources({"CPU": 4.0, "node:10.0.0.2": 1.0}),
    OpenFailed("no port"),
]


def goal(**changes: Any) -> ReplicaGoal:
    config = ReplicaConfig(import_path="a:b", init_kwargs={"x": [1, {"y": None}]})
    return build_goal(replica_config=config, **changes)


CALLS: list[Call] = [
    Open(SETTINGS),
    Start(goal(), BUS),
    Reconfigure(goal(user_config={"a": 1.5})),
    Renew(TAG, UserIdentity(jwt="d.e.f", seed="SV", expires_at=2.5)),
    CheckHealth(TAG),
    Drain(TAG),
    Kill(TAG),
    KillByForce(TAG),
    Close(),
]


def body(message: Call | Notice) -> bytes:
    return encode(message)[4:]


def test_what_is_said_is_what_is_heard() -> None:
    for notice in NOTICES:
        assert decode_notice(body(notice)) == notice
    for call in CALLS:
        assert decode_call(body(call)) == call


class Runs:
    """What unpickling it would do is seen."""

    def __reduce__(self) -> Any:
        return os.abort, ()


def hostile(kind: str, **fields: Any) -> bytes:
    return msgspec.msgpack.encode({"type": kind, "replica_tag": TAG, **fields})


def resources(whole: dict[str, float]) -> bytes:
    return msgspec.msgpack.encode({"type": "Resources", "whole": whole})


HOSTILE = {
    "a pickle": pickle.dumps(Runs()),
    "nothing": b"",
    "an unknown message": hostile("Shutdown"),
    "a call": body(Kill(TAG)),
    "an unknown field": hostile("Drained", extra=1),
    "a tag that is too long": hostile("Drained", replica_tag="x" * 201),
    "a tag that is no text": hostile("Drained", replica_tag=7),
    "no UTF-8": b"\x82\xa4type\xa7Drained\xabreplica_tag\xa2\xff\xfe",
    "a pid beyond all": hostile("Placed", pid=2**63 - 1),
    "a pid below": hostile("Placed", pid=-1),
    "a pid of text": hostile("Placed", pid="7"),
    "files elsewhere": hostile("Placed", pid=1, process="../../etc/passwd"),
    "files of all": hostile("Placed", pid=1, process="*"),
    "a process with a line end": hostile("Placed", pid=1, process="a\n"),
    "an address to print": hostile("Placed", pid=1, address="\x1b[2J"),
    "a version beyond all": hostile("Constructed", config_version=2**63),
    "an error without end": hostile("StartFailed", error="x" * (TEXT_LENGTH_MAX + 1)),
    "no error": hostile("StartFailed", error=None),
    "an endless resource": resources({"CPU": float("inf")}),
    "a large resource": resources({"CPU": 1e308}),
    "a negative resource": resources({"CPU": -1.0}),
    "too many resources": resources({str(number): 1.0 for number in range(1_001)}),
    "a deep nest": b"\x91" * 200_000,
    "a deep nest in a message": b"\x82\xa4type\xa7Drained\xa5extra" + b"\x91" * 100_000,
    "a length that lies": b"\xdf\xff\xff\xff\xff",
    "more behind it": body(Drained(TAG)) + b"\x00",
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE.keys())
def test_what_no_runtime_of_ours_says_is_refused(data: bytes) -> None:
    with pytest.raises(RayProtocolError):
        decode_notice(data)


def test_garbage_is_refused_or_within_all_bounds() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    good = [body(notice) for notice in NOTICES]
    understood = 0
    for _ in range(20_000):
        data = bytearray(rng.choice(good))
        for _ in range(rng.randrange(1, 5)):
            at = rng.randrange(len(data))
            match rng.randrange(4):
                case 0:
                    data[at] = rng.randrange(256)
                case 1:
                    del data[at:]
                case 2:
                    data[at:at] = rng.randbytes(rng.randrange(1, 9))
                case _:
                    data[at:at] = rng.choice(good)
            if not data:
                break
        try:
            notice = decode_notice(bytes(data))
        except RayProtocolError:
            continue
        understood += 1
        encode(notice)
        assert len(getattr(notice, "replica_tag", "")) <= 200
        assert len(getattr(notice, "error", None) or "") <= TEXT_LENGTH_MAX
    assert understood  # some changes leave a message, such as another letter in an error


def test_a_number_that_cannot_be_sent_is_said_and_breaks_nothing() -> None:
    with pytest.raises(RayProtocolError, match="cannot be sent"):
        encode(Start(goal(user_config=2**80), BUS))


def test_honest_text_of_any_length_fits() -> None:
    text = "\ud800" + "ä" * 10 * TEXT_LENGTH_MAX + "the end"
    events: list[ReplicaEvent] = [
        ReplicaStartFailed(TAG, text),
        ProcessEnded(TAG, text),
        Reconfigured(TAG, 1, text),
        HealthChecked(TAG, text),
        Waits(TAG, text),
    ]
    for event in events:
        heard: Any = decode_notice(body(bounded(event)))
        assert (heard.reason if isinstance(event, Waits) else heard.error).endswith("the end")
    assert bounded(HealthChecked(TAG, None)) == HealthChecked(TAG, None)


def test_nothing_that_the_host_is_told_is_inherited_and_what_users_set_is() -> None:
    inherited = {"PATH": "/bin", "HF_TOKEN": "mine", "RAY_ADDRESS": "a:1", "MUSTER_LOG_LEVEL": "DEBUG"}
    marks = {"MUSTER_STACK_ID": "1", "MUSTER_PROCESS": "replica-host", "MUSTER_STATE_DIR": "/s"}
    hidden = {
        "MUSTER_NATS_PASSWORD": "p",
        "MUSTER_NATS_PASSWORD_FILE": "/run/secrets/nats_host",
        "MUSTER_REPLICA_NATS_PASSWORD_FILE": "/run/secrets/nats_replica",
        "MUSTER_CLIENT_PASSWORD_FILE": "/f",
        "PROMETHEUS_MULTIPROC_DIR": "/m",
    }
    defaults = {"RUNTIME_ENV_RETRY_TIMES": "1"}
    assert runtime_environment(inherited | marks | hidden) == inherited | marks | defaults
    assert runtime_environment({"RUNTIME_ENV_RETRY_TIMES": "5"}) == {"RUNTIME_ENV_RETRY_TIMES": "5"}


# -- a real process in place of Ray's -----------------------------------------------------------------------------

_PRELUDE = """
import os, socket, sys, time
host = socket.socket(fileno=int(sys.argv[1]))
def said(body): host.sendall(len(body).to_bytes(4, "big") + body)
host.recv(65536)
"""
RESOURCES = f"said({body(Resources({'CPU': 1.0}))!r})\n"

Runtime = Callable[[str], Awaitable[RayProcess]]


class World:
    def __init__(self) -> None:
        self.events: list[ReplicaEvent] = []
        self.backlog = 0
        self.processes: list[RayProcess] = []
        self.tasks = TaskOwner("test")

    def take(self, process: RayProcess) -> None:
        """What it says, from now on."""
        self.tasks.start(process.run(), "run")

    async def opened(self, script: str) -> RayProcess:
        """A host's end whose other end says that Ray is there and then runs ``script``."""
        process = RayProcess(SETTINGS, command=[sys.executable, "-c", _PRELUDE + RESOURCES + script])
        self.processes.append(process)
        await process.open(self.events.append, lambda: self.backlog)
        return process


@pytest.fixture
async def world() -> AsyncIterator[World]:
    world = World()
    yield world
    await world.tasks.close(5)
    for process in world.processes:
        process._kill_process()
        await process.close()


def is_gone(process: RayProcess) -> bool:
    return process._process.poll() is not None


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("said(b'\\x80\\x04garbage'); time.sleep(60)", "broke the protocol"),
        ("host.sendall(b'\\xff\\xff\\xff\\xff' + b'x' * 1000); time.sleep(60)", "broke the protocol"),
        ("host.sendall(b'\\x00\\x00'); host.shutdown(2); time.sleep(60)", "broke the protocol"),
        ("os.kill(os.getpid(), 9)", "killed by SIGKILL"),
        ("sys.exit(3)", "exited with code 3"),
    ],
)
async def test_the_end_of_the_runtime_is_the_end_of_the_host_and_says_why(
    world: World, script: str, why: str
) -> None:
    process = await world.opened(script)
    with pytest.raises(RayUnavailable, match=why):
        await process.run()
    assert is_gone(process)
    assert world.events == []


async def test_a_runtime_that_cannot_start_ray_says_so(world: World) -> None:
    said = f"said({body(OpenFailed('no port is free'))!r})\ntime.sleep(60)"
    process = RayProcess(SETTINGS, command=[sys.executable, "-c", _PRELUDE + said])
    world.processes.append(process)
    with pytest.raises(RayUnavailable, match="no port is free"):
        await process.open(world.events.append, lambda: 0)


async def test_a_flood_waits_until_the_host_has_looked_at_what_came(world: World) -> None:
    process = await world.opened(f"while True: said({body(Drained(TAG))!r})")
    world.backlog = ray_process._BACKLOG_MAX + 1
    world.take(process)
    for _ in range(100):
        await asyncio.sleep(0.001)
    assert world.events == []
    world.backlog = 0
    await eventually(lambda: world.events)


async def test_a_flood_is_taken_at_a_bounded_rate(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_process, "_NOTICES_BURST", 100.0)
    monkeypatch.setattr(ray_process, "_NOTICES_PER_S", 50.0)
    process = await world.opened(f"while True: said({body(Drained(TAG))!r})")
    began = time.monotonic()
    world.take(process)
    await eventually(lambda: len(world.events) >= 120)
    took = time.monotonic() - began
    assert len(world.events) <= 100 + 50 * took + 1


async def test_a_runtime_that_reads_nothing_is_ended_when_too_much_waits_for_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_process, "UNSENT_BYTES_MAX", 2 * 1024 * 1024)
    process = await world.opened("time.sleep(600)")
    for _ in range(8):
        process.start(goal(user_config="x" * 500_000), BUS)
    with pytest.raises(RayUnavailable, match="does not read"):
        await process.run()
    assert is_gone(process)


async def test_a_goal_that_cannot_be_sent_fails_its_replica_alone(world: World) -> None:
    process = await world.opened("time.sleep(600)")
    process.start(goal(user_config=2**80), BUS)
    process.reconfigure(goal(user_config=2**80))
    assert [type(event) for event in world.events] == [ReplicaStartFailed, ProcessEnded, Reconfigured]
    assert not is_gone(process)


async def test_a_runtime_that_hangs_is_unhealthy_and_one_that_speaks_is_not(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_process, "RESOURCES_INTERVAL_S", 0.01)
    process = await world.opened("time.sleep(600)")
    world.tasks.start(process.watch(), "watch")
    assert process.health_error(0.1) is None
    await eventually(lambda: process.health_error(0.1))
    process._on_notice(Resources({"CPU": 2.0}))
    assert process.health_error(0.1) is None


async def test_only_the_socket_and_the_standard_streams_are_inherited(world: World) -> None:
    read, write = os.pipe()
    os.set_inheritable(write, True)
    try:
        script = (
            "fds = sorted(int(fd) for fd in os.listdir('/proc/self/fd') if os.path.exists(f'/proc/self/fd/{fd}'))\n"
            "import json\n"
            "mine = [fd for fd in fds if fd > 2 and fd != host.fileno()]\n"
            "links = [os.readlink(f'/proc/self/fd/{fd}') for fd in mine]\n"
            f"assert not links, links\nsaid({body(Drained(TAG))!r})\ntime.sleep(60)"
        )
        process = await world.opened(script)
        world.take(process)
        await eventually(lambda: world.events or is_gone(process))
        assert world.events == [Drained(TAG)]
    finally:
        os.close(read)
        os.close(write)


def test_a_notice_is_never_larger_than_the_host_takes() -> None:
    with pytest.raises(RayProtocolError):
        encode(Resources({"x" * NOTICE_BYTES_MAX: 1.0}))
