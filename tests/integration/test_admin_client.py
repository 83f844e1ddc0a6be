"""The admin client against a real nats-server with the users of deploy/nats/nats.conf, and a small controller."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import msgspec
import nats
import nats.micro
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.micro.request import Request
from nats.micro.service import ServiceConfig

from muster.client import Stack, StackAddress, connect_stack
from muster.secrets import Secrets, generate
from serve_common.api.commands import ChangeReply, Deploy
from serve_common.api.queries import GetStatus
from serve_common.api.views import ErrorView
from serve_common.config.backend import BackendConfig, ReplicaConfig
from serve_common.errors import (
    BadField,
    BusAuthorizationFailed,
    BusUnavailable,
    TransientError,
    UserCodeRaised,
)
from serve_common.names import EndpointTag, GoalId
from serve_common.protocol.subjects import ADMIN_SERVICE, GATEWAY_QUEUE, Subjects
from tests.support.identities import lay_out_nats
from tests.support.servers import nats_server
from tests.support.servers.nats_server import until_known

SUBJECTS = Subjects()
DEPLOY = Deploy(name="digits", replica_config=ReplicaConfig(import_path="digits:Digits"))
NEVER_S = 3600.0
"""A time-out that would be noticed."""


class NatsServer(nats_server.NatsServer):
    """A nats-server of one test's own with the plain users of deploy/nats."""

    def __init__(self, directory: Path) -> None:
        self.secrets: Secrets = generate(directory / "secrets", plain=True)
        config = lay_out_nats(directory, self.secrets, plain=True)
        super().__init__(directory, config=config.read_text())

    def address(self, user: str = "admin", password: str | None = None) -> StackAddress:
        return StackAddress(
            urls=(self.url,),
            user=user,
            password=password or self.secrets.read(f"nats_{user}"),
        )


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    with NatsServer(tmp_path) as server:
        yield server


def reach(
    server: NatsServer, user: str = "admin", retry_for_s: float = 30.0
) -> AbstractAsyncContextManager[Stack]:
    return connect_stack(server.address(user), retry_for_s=retry_for_s)


@asynccontextmanager
async def connected(server: NatsServer, role: str) -> AsyncIterator[Client]:
    client = await nats.connect(
        server.url,
        user=role,
        password=server.secrets.read(f"nats_{role}"),
        inbox_prefix=f"_INBOX_{role}".encode(),
    )
    try:
        yield client
    finally:
        await client.close()


@asynccontextmanager
async def controller(server: NatsServer, reply: ChangeReply) -> AsyncIterator[None]:
    """Answers each deploy as a controller does."""
    async with connected(server, "controller") as client:
        service = await nats.micro.add_service(client, ServiceConfig(name=ADMIN_SERVICE, version="0.0.1"))
        group = service.add_group(name=SUBJECTS.admin_group, queue_group="controllers")

        async def handle(request: Request) -> None:
            await request.respond(msgspec.json.encode(reply))

        await group.add_endpoint(name="deploy", handler=handle)
        await until_known(client)
        yield


async def test_no_controller_is_known_at_once_and_said_with_the_address(server: NatsServer) -> None:
    async with reach(server, retry_for_s=0.1) as stack:
        # Not after a time-out: this one would never come.
        with pytest.raises(TransientError, match=f"no controller answers at {server.url}"):
            await stack.admin.call(GetStatus(), attempt_s=NEVER_S)
        stack.caller._retry_for_s = 0.1
        with pytest.raises(TransientError, match="no proxy answers calls"):
            await stack.caller.call("digits", b"", headers={}, timeout_s=NEVER_S)


async def test_a_deploy_survives_the_death_of_nats_and_a_controller_that_comes_late(
    server: NatsServer,
) -> None:
    reply = ChangeReply(goal_id=GoalId("goal-1"), updating=True)
    troubles: asyncio.Queue[str] = asyncio.Queue()

    async def heal() -> None:
        while "no controller answers" not in await troubles.get():
            pass
        server.kill()
        while "127.0.0.1" not in (said := await troubles.get()) or "no controller" in said:
            pass
        await asyncio.to_thread(server.start)
        async with controller(server, reply):
            await is_answered.wait()

    is_answered = asyncio.Event()
    async with (
        connect_stack(server.address(), retry_for_s=50, on_retry=troubles.put_nowait) as stack,
        asyncio.TaskGroup() as tasks,
    ):
        healing = tasks.create_task(heal())
        assert await stack.admin.call(DEPLOY) == reply
        is_answered.set()
        await healing


async def test_a_request_under_way_ends_when_nats_dies_and_not_at_its_time_out(server: NatsServer) -> None:
    async with connected(server, "controller") as client:
        heard = asyncio.Event()

        async def never_answer(_message: Msg) -> None:
            heard.set()

        await client.subscribe(SUBJECTS.admin("get_status"), cb=never_answer)
        await until_known(client)

        async def kill_once_heard() -> None:
            await heard.wait()
            server.kill()

        async with reach(server, retry_for_s=0.1) as stack, asyncio.TaskGroup() as tasks:
            killing = tasks.create_task(kill_once_heard())
            with pytest.raises(TransientError):
                await stack.admin.call(GetStatus(), attempt_s=NEVER_S)
            await killing


async def test_a_wrong_password_is_told_as_such(server: NatsServer) -> None:
    with pytest.raises(
        BusAuthorizationFailed, match="refused the user 'admin' with the password that was given"
    ):
        async with connect_stack(server.address(password="wrong-password"), connect_within_s=3600):
            pass
    with pytest.raises(BusAuthorizationFailed, match="without a password"):
        async with connect_stack(StackAddress(urls=(server.url,)), connect_within_s=3600):
            pass


async def test_another_role_is_told_that_it_may_not(server: NatsServer) -> None:
    async with controller(server, ChangeReply(goal_id=GoalId("g"), updating=True)):
        with pytest.raises(BusAuthorizationFailed, match="does not allow the user 'proxy'"):
            async with reach(server, "proxy", retry_for_s=0.1) as stack:
                await stack.admin.call(DEPLOY, attempt_s=NEVER_S)


async def test_nothing_at_the_address_is_an_error_within_the_time_given(tmp_path: Path) -> None:
    server = NatsServer(tmp_path)
    begun = time.monotonic()
    with pytest.raises(BusUnavailable, match=f"NATS at {server.url} does not answer"):
        async with connect_stack(server.address(), connect_within_s=0.3):
            pass
    server.close()
    assert time.monotonic() - begun < 20, "each try to connect ends at once; only giving up could take long"


async def test_what_nats_cannot_carry_is_refused_by_its_size(server: NatsServer) -> None:
    huge = msgspec.structs.replace(DEPLOY, backend_config=BackendConfig(user_config="x" * 1_100_000))
    async with reach(server) as stack:
        with pytest.raises(BadField, match="NATS carries at most 1048576"):
            await stack.admin.call(huge)


async def test_a_call_reaches_the_gateways_and_bears_headers_both_ways(server: NatsServer) -> None:
    subject = SUBJECTS.call(EndpointTag("default/digits"))
    async with connected(server, "proxy") as gateway, reach(server) as stack:

        async def answer(message: Msg) -> None:
            if message.data == b"raise":
                view = ErrorView(code="user_code_raised", message="ValueError: no")
                headers = {"Nats-Service-Error": "ValueError: no", "Nats-Service-Error-Code": "500"}
                await gateway.publish(message.reply, msgspec.json.encode(view), headers=headers)
                return
            shout = (message.headers or {}).get("X-Shout", "")
            await gateway.publish(message.reply, message.data + shout.encode(), headers={"X-Answer": "yes"})

        await gateway.subscribe(subject, queue=GATEWAY_QUEUE, cb=answer)
        await until_known(gateway)
        reply = await stack.caller.call("digits", b"7", headers={"X-Shout": "!"}, timeout_s=20)
        assert reply.body == b"7!"
        assert reply.headers["X-Answer"] == "yes"
        with pytest.raises(UserCodeRaised, match="ValueError: no"):
            await stack.caller.call("digits", b"raise", headers={}, timeout_s=20)
