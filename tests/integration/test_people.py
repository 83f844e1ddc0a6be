"""A person, on a real server: their password opens an identity of NATS with which they do what their role may."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator

import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg

from muster.client import StackAddress
from muster.client.feed import NatsFeed
from muster.client.nats import NatsRequests
from muster.client.people import address_of_person
from muster.console_users import IdentitySource, add_person, find_source, read_people
from muster.secrets import Secrets, generate
from serve_common.errors import BusAuthorizationFailed
from serve_common.identities.people import open_person
from serve_common.identities.roles import Role
from serve_common.nats.client import connect_nats
from serve_common.protocol.subjects import Subjects
from tests.support.identities import bus_settings, lay_out_nats
from tests.support.servers.nats_server import NatsServer, until_known
from tests.support.waiting import eventually

SUBJECTS = Subjects()
PASSWORD = "correct horse"


class Stack:
    """A nats-server with one person of each role, and a controller that echoes."""

    def __init__(self, server: NatsServer, secrets: Secrets, *, is_plain: bool) -> None:
        self.server = server
        self.secrets = secrets
        self.is_plain = is_plain

    def address(self, role: Role) -> StackAddress:
        """How the person of that role reaches the stack."""
        name = f"{role.value}@x.org"
        opened = open_person(read_people(self.secrets)[name], PASSWORD)
        return address_of_person(StackAddress(urls=(self.server.url,)), name, role, opened)

    @contextlib.asynccontextmanager
    async def controller(self) -> AsyncIterator[Client]:
        """A controller that returns what it is sent, and its subject."""
        settings = bus_settings(self.secrets, self.server.url, Role.CONTROLLER, plain=self.is_plain)
        client = await connect_nats(settings, name="controller", deadline_s=20)

        async def echo(message: Msg) -> None:
            await message.respond(message.subject.encode() + b" " + message.data)

        await client.subscribe(SUBJECTS.admin("*"), cb=echo)
        await until_known(client)
        try:
            yield client
        finally:
            await client.close()


@pytest.fixture(scope="module", params=["identities", "plain"])
def stack(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    is_plain = request.param == "plain"
    directory = tmp_path_factory.mktemp("nats")
    secrets = generate(directory / "secrets", plain=is_plain)
    source = IdentitySource(secrets, None) if is_plain else find_source(secrets)
    for role in (Role.VIEW, Role.OPERATE, Role.ADMIN):
        add_person(source, f"{role.value}@x.org", role, PASSWORD)
    with NatsServer(directory, config=lay_out_nats(directory, secrets, plain=is_plain).read_text()) as server:
        yield Stack(server, secrets, is_plain=is_plain)


@pytest.mark.parametrize(
    ("role", "allowed", "forbidden"),
    [
        (Role.VIEW, ["get_status", "plan"], ["scale", "deploy", "get_backup"]),
        (Role.OPERATE, ["get_status", "scale"], ["deploy", "delete_deployment", "get_backup"]),
        (Role.ADMIN, ["get_status", "scale", "deploy", "get_backup"], []),
    ],
)
async def test_a_person_does_what_their_role_may_and_is_refused_all_else(
    stack: Stack, role: Role, allowed: list[str], forbidden: list[str]
) -> None:
    requests = NatsRequests(stack.address(role))
    try:
        async with stack.controller():
            for verb in allowed:
                subject = SUBJECTS.admin(verb)
                reply = await requests.request(subject, b"{}", timeout_s=20)
                assert reply.body == f"{subject} {{}}".encode()
            for verb in forbidden:
                with pytest.raises(BusAuthorizationFailed, match=stack.address(role).user):
                    await requests.request(SUBJECTS.admin(verb), b"{}", timeout_s=20)
        logged = (stack.server.directory / "log").read_text()
        person = read_people(stack.secrets)[f"{role.value}@x.org"]
        assert not forbidden or f'{person.nats_user}" - Publish Violation' in logged
    finally:
        await requests.close()


async def test_a_person_who_views_follows_events(stack: Stack) -> None:
    feed = NatsFeed(stack.address(Role.VIEW))
    try:
        await feed.open([SUBJECTS.events, SUBJECTS.logs(), SUBJECTS.leader])
        async with stack.controller() as controller:
            await controller.publish(SUBJECTS.event("goal", "g7"), b"came")
            message = await feed.receive(20)
        assert message is not None
        assert (message.subject, message.payload) == (SUBJECTS.event("goal", "g7"), b"came")
    finally:
        await feed.close()


async def test_the_controllers_reply_goes_to_nobody_but_who_sent_the_request(stack: Stack) -> None:
    """Whoever operates can subscribe to what operators are sent, and to nothing that admins or viewers are."""
    settings = stack.address(Role.OPERATE).bus_settings("_INBOX_operate")
    operator = await connect_nats(settings, name="operator", deadline_s=20)
    received: list[Msg] = []

    async def take(message: Msg) -> None:
        received.append(message)

    try:
        for subject in ("_INBOX.>", "_INBOX_admin.>", "_INBOX_view.>", "_R_.>", ">"):
            await operator.subscribe(subject, cb=take)
            await eventually(
                lambda subject=subject: f'"{subject}"'.lower() in str(operator.last_error).lower()
            )
        async with stack.controller():
            for role in (Role.ADMIN, Role.VIEW):
                requests = NatsRequests(stack.address(role))
                assert (await requests.request(SUBJECTS.admin("get_status"), b"{}", timeout_s=20)).body
                await requests.close()
        await operator.flush()
        assert received == []
    finally:
        await operator.close()


async def test_a_rotated_role_shuts_its_people_out_and_no_others(stack: Stack) -> None:
    if stack.is_plain:
        pytest.skip("plain users have passwords in place of keys")
    former = stack.address(Role.OPERATE), stack.address(Role.VIEW)
    directory = stack.server.directory / "rotated"
    directory.mkdir()
    secrets = generate(stack.secrets.directory, rotate=Role.OPERATE)
    with NatsServer(directory, config=lay_out_nats(directory, secrets).read_text()) as server:
        for address, is_refused in zip(former, (True, False), strict=True):
            moved = NatsRequests(
                StackAddress(
                    urls=(server.url,), user=address.user, identity=address.identity, role=address.role
                )
            )
            with pytest.raises(BusAuthorizationFailed) if is_refused else contextlib.nullcontext():
                await moved.connect(within_s=20)
            await moved.close()
