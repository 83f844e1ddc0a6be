"""The admin client against a real nats-server with the users of deploy/nats/nats.conf, and a small controller."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sysconfig
import time
from collections.abc import AsyncIterator, Callable, Iterator
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
from serve_common.api.queries import GetDeploymentInfo, GetStatus
from serve_common.api.verbs import ErrorView
from serve_common.api.views import GoalStatus, GoalView
from serve_common.config.backend import BackendConfig
from serve_common.config.replica import ReplicaConfig
from serve_common.errors import (
    BadField,
    BusAuthorizationFailed,
    BusUnavailable,
    NotFound,
    TransientError,
    UserCodeRaised,
)
from serve_common.names import EndpointTag, GoalId
from serve_common.protocol.subjects import ADMIN_SERVICE, GATEWAY_QUEUE, Subjects
from tests.support.identities import lay_out_nats
from tests.support.servers.nats_server import until_known
from tests.support.servers.reserved_port import HeldPort

SUBJECTS = Subjects()
DEPLOY = Deploy(name="digits", replica_config=ReplicaConfig(import_path="digits:Digits"))
NEVER_S = 3600.0
"""A time-out that would be noticed."""


class NatsServer:
    """A nats-server of one test's own that can be killed and started again on its port."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.secrets: Secrets = generate(directory / "secrets", plain=True)
        lay_out_nats(directory, self.secrets, plain=True)
        self._held_port = HeldPort()
        self.port = self._held_port.port
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        binary = Path(sysconfig.get_path("scripts")) / "nats-server"
        place = ["-c", self._directory / "nats.conf", "--store_dir", self._directory / "js"]
        with (self._directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [binary, *place, "--addr", "127.0.0.1", "--port", str(self.port)], stdout=log, stderr=log
            )

    def wait_until_ready(self) -> None:
        give_up_at = time.monotonic() + 30
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                return
            except OSError:
                assert time.monotonic() < give_up_at, (self._directory / "log").read_text()
                time.sleep(0.02)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def close(self) -> None:
        """For good."""
        self.kill()
        self._held_port.release()

    def address(self, user: str = "admin", password: str | None = None) -> StackAddress:
        return StackAddress(
            urls=(f"nats://127.0.0.1:{self.port}",),
            user=user,
            password=password or self.secrets.read(f"nats_{user}"),
        )


@pytest.fixture
def server(tmp_path: Path) -> Iterator[NatsServer]:
    server = NatsServer(tmp_path)
    server.start()
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.close()


def reach(
    server: NatsServer, user: str = "admin", retry_for_s: float = 30.0
) -> AbstractAsyncContextManager[Stack]:
    return connect_stack(server.address(user), retry_for_s=retry_for_s)


@asynccontextmanager
async def connected(server: NatsServer, role: str) -> AsyncIterator[Client]:
    client = await nats.connect(
        f"nats://127.0.0.1:{server.port}",
        user=role,
        password=server.secrets.read(f"nats_{role}"),
        inbox_prefix=f"_INBOX_{role}".encode(),
    )
    try:
        yield client
    finally:
        await client.close()


@asynccontextmanager
async def controller(server: NatsServer, **answers: Callable[[bytes], object]) -> AsyncIterator[None]:
    """Answers verbs as a controller does; an `ErrorView` becomes an error reply."""
    async with connected(server, "controller") as client:
        service = await nats.micro.add_service(client, ServiceConfig(name=ADMIN_SERVICE, version="0.0.1"))
        group = service.add_group(name=SUBJECTS.admin_group, queue_group="controllers")

        def handler(answer: Callable[[bytes], object]) -> Callable[[Request], object]:
            async def handle(request: Request) -> None:
                value = answer(request.data)
                body = msgspec.json.encode(value)
                if isinstance(value, ErrorView):
                    await request.respond_error("400", "short", data=body)
                else:
                    await request.respond(body)

            return handle

        for verb, answer in answers.items():
            await group.add_endpoint(name=verb, handler=handler(answer))
        await until_known(client)
        yield


async def test_values_and_errors_travel_through_a_real_micro_service(server: NatsServer) -> None:
    done = GoalView(goal_id=GoalId("goal-1"), status=GoalStatus.SUCCEEDED)
    refusal = ErrorView(code="not_found", message="name: there is no deployment 'x'\nsecond line")
    async with (
        controller(
            server,
            deploy=lambda body: ChangeReply(
                goal_id=GoalId(msgspec.json.decode(body, type=Deploy).request_id or "none"), updating=True
            ),
            wait_for_goal=lambda _body: done,
            get_deployment_info=lambda _body: refusal,
        ),
        reach(server) as stack,
    ):
        reply = await stack.admin.call(msgspec.structs.replace(DEPLOY, request_id="mine"))
        assert reply == ChangeReply(goal_id=GoalId("mine"), updating=True)
        assert await stack.admin.wait_for_goal(GoalId("goal-1"), deadline_s=5) == done
        with pytest.raises(NotFound) as caught:
            await stack.admin.call(GetDeploymentInfo(name="x"))
        assert str(caught.value) == refusal.message


async def test_no_controller_is_known_at_once_and_said_with_the_address(server: NatsServer) -> None:
    async with reach(server, retry_for_s=0.1) as stack:
        # Not after a time-out: this one would never come.
        with pytest.raises(TransientError, match=f"no controller answers at nats://127.0.0.1:{server.port}"):
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
        server.start()
        await asyncio.to_thread(server.wait_until_ready)
        async with controller(server, deploy=lambda _body: reply):
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
        async with connect_stack(
            StackAddress(urls=(f"nats://127.0.0.1:{server.port}",)), connect_within_s=3600
        ):
            pass


async def test_another_role_is_told_that_it_may_not(server: NatsServer) -> None:
    async with controller(server, deploy=lambda _body: ChangeReply(goal_id=GoalId("g"), updating=True)):
        with pytest.raises(BusAuthorizationFailed, match="does not allow the user 'proxy'"):
            async with reach(server, "proxy", retry_for_s=0.1) as stack:
                await stack.admin.call(DEPLOY, attempt_s=NEVER_S)


async def test_nothing_at_the_address_is_an_error_within_the_time_given(tmp_path: Path) -> None:
    server = NatsServer(tmp_path)
    begun = time.monotonic()
    with pytest.raises(BusUnavailable, match=f"NATS at nats://127.0.0.1:{server.port} does not answer"):
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
