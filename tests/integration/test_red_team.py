"""The red team: what a model's code, and whoever stole a role's credentials, tries against a stack that serves.

Every attempt is refused or without effect: a bystander's requests are all answered by its own replicas meanwhile, what
is deployed stays as it is, and each refusal can be seen where people look: NATS' log or a service's metric.
SECURITY.md has the table. What needs containers (files, users, networks) is in tests/compose.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import msgspec
import pytest
import pytest_asyncio

from serve_common.api.commands import Deploy
from serve_common.api.queries import GetDeploymentInfo, GetHistory, GetStatus, ListDeployments
from serve_common.config.backend import BackendConfig, RayActorOptions, ReplicaConfig
from serve_common.identities.credentials import UserIdentity
from serve_common.identities.roles import Role, inbox_prefix
from serve_common.protocol.subjects import Subjects
from serve_common.runtime.settings import BusSettings
from tests.integration.red_team import Intruder
from tests.support.identities import bus_settings
from tests.support.paths import APPS
from tests.support.stacks.loaded_stack import LoadedStack
from tests.support.waiting import eventually

pytestmark = [pytest.mark.timeout(400), pytest.mark.asyncio(loop_scope="module")]

SUBJECTS = Subjects()
BUCKET = f"KV_{SUBJECTS.bucket}"
APP_DIR = APPS / "red_team_app"
CREATE = f"$JS.API.CONSUMER.CREATE.{BUCKET}"

# (who, what, subject): each must be refused by NATS itself.
FORBIDDEN = [
    # A model's code, with the credentials of its own replica (evil/mole).
    ("replica", "SUB", ">"),
    ("replica", "SUB", "serve.>"),
    ("replica", "SUB", "serve.replica.>"),
    ("replica", "SUB", "serve.replica.shop.till.*"),
    ("replica", "SUB", "_INBOX_proxy.>"),
    ("replica", "SUB", "_INBOX_replica.>"),
    ("replica", "SUB", "_INBOX_client.>"),
    ("replica", "SUB", "_R_.>"),
    ("replica", "SUB", "serve.call.>"),
    ("replica", "SUB", "serve.admin.>"),
    ("replica", "SUB", "serve.report.>"),
    ("replica", "SUB", "serve.host.>"),
    ("replica", "SUB", "serve.event.>"),
    ("replica", "SUB", "serve.log.>"),
    ("replica", "SUB", "$KV.serve-snapshots.>"),
    ("replica", "SUB", "$SRV.>"),
    ("replica", "SUB", "$SYS.>"),
    ("replica", "PUB", "serve.admin.shutdown"),
    ("replica", "PUB", "serve.admin.delete_deployment"),
    ("replica", "PUB", "serve.report.host.host-1"),
    ("replica", "PUB", "serve.report.evaluation.host-1"),
    ("replica", "PUB", "serve.host.host-1.evaluate"),
    ("replica", "PUB", "serve.report.proxy.proxy-1"),
    ("replica", "PUB", "serve.host.host-1.goal"),
    ("replica", "PUB", "serve.leader"),
    ("replica", "PUB", "serve.event.goal.g1"),
    ("replica", "PUB", "serve.snapshot.endpoints.shop.till"),
    ("replica", "PUB", "$KV.serve-snapshots.endpoints.shop.till"),
    ("replica", "PUB", "serve.replica.shop.till.1"),
    ("replica", "PUB", "serve.call.shop.till"),
    ("replica", "PUB", "serve.wake.shop.till"),
    ("replica", "PUB", "serve.models.shop.till.1"),
    ("replica", "PUB", "serve.log.replica.shop.till.1"),
    ("replica", "PUB", "serve.log-recall"),
    ("replica", "PUB", "$SRV.PING"),
    ("replica", "PUB", CREATE),
    ("replica", "PUB", f"{CREATE}.deputy"),
    ("replica", "PUB", f"$JS.API.STREAM.DELETE.{BUCKET}"),
    ("replica", "PUB", f"$JS.API.STREAM.PURGE.{BUCKET}"),
    ("replica", "PUB", f"$JS.API.STREAM.UPDATE.{BUCKET}"),
    ("replica", "PUB", "$JS.API.INFO"),
    # A program outside that holds handles.
    ("client", "SUB", "serve.replica.>"),
    ("client", "SUB", "_INBOX_proxy.>"),
    ("client", "PUB", "serve.admin.shutdown"),
    ("client", "PUB", "serve.report.host.host-1"),
    ("client", "PUB", "serve.snapshot.endpoints.shop.till"),
    ("client", "PUB", "$KV.serve-snapshots.endpoints.shop.till"),
    ("client", "PUB", f"{CREATE}.deputy"),
    # A program outside that calls.
    ("caller", "SUB", "serve.replica.>"),
    ("caller", "SUB", "serve.call.>"),
    ("caller", "SUB", "_INBOX_client.>"),
    ("caller", "SUB", "serve.snapshot.>"),
    ("caller", "PUB", "serve.replica.shop.till.1"),
    ("caller", "PUB", "serve.wake.shop.till"),
    ("caller", "PUB", "serve.admin.shutdown"),
    ("caller", "PUB", "$SRV.PING"),
    ("caller", "PUB", f"{CREATE}.deputy"),
    # People who may see, and people who may operate.
    ("view", "SUB", "_INBOX.>"),
    ("view", "SUB", "_INBOX_admin.>"),
    ("view", "SUB", "_INBOX_operate.>"),
    ("view", "SUB", "serve.call.>"),
    ("view", "SUB", "serve.capture.>"),
    ("view", "PUB", "serve.admin.scale"),
    ("view", "PUB", "serve.admin.deploy"),
    ("view", "PUB", "serve.admin.get_backup"),
    ("view", "PUB", "serve.call.shop.till"),
    ("view", "PUB", "$JS.API.DIRECT.GET.serve-captures"),
    ("operate", "SUB", "_INBOX.>"),
    ("operate", "SUB", "_INBOX_admin.>"),
    ("operate", "SUB", "_INBOX_view.>"),
    ("operate", "SUB", "serve.replica.>"),
    ("operate", "SUB", "serve.admin.>"),
    ("operate", "PUB", "serve.admin.deploy"),
    ("operate", "PUB", "serve.admin.delete_deployment"),
    ("operate", "PUB", "serve.admin.upload_code"),
    ("operate", "PUB", "serve.admin.update_backend_config"),
    ("operate", "PUB", "serve.admin.get_backup"),
    ("operate", "PUB", "serve.admin.shutdown"),
    ("operate", "PUB", "serve.replica.shop.till.1"),
    ("operate", "PUB", "$KV.serve-snapshots.endpoints.shop.till"),
    ("operate", "PUB", f"$JS.API.STREAM.PURGE.{BUCKET}"),
    # Who stole a proxy's key, and comes as that very proxy.
    ("proxy", "SUB", "serve.admin.>"),
    ("proxy", "SUB", "serve.replica.>"),
    ("proxy", "SUB", "serve.report.>"),
    ("proxy", "SUB", "_INBOX_proxy.proxy-2.>"),
    ("proxy", "PUB", "serve.admin.shutdown"),
    ("proxy", "PUB", "serve.report.proxy.proxy-2"),
    ("proxy", "PUB", "serve.report.host.host-1"),
    ("proxy", "PUB", "serve.host.host-1.goal"),
    ("proxy", "PUB", "serve.snapshot.endpoints.shop.till"),
    ("proxy", "PUB", "$KV.serve-snapshots.endpoints.shop.till"),
    ("proxy", "PUB", f"{CREATE}.deputy"),
    # Who stole a host's key, and comes as that very host.
    ("host", "SUB", "serve.replica.>"),
    ("host", "SUB", "serve.host.host-2.goal"),
    ("host", "SUB", "serve.admin.>"),
    ("host", "PUB", "serve.admin.shutdown"),
    ("host", "PUB", "serve.report.host.host-2"),
    ("host", "PUB", "serve.report.proxy.proxy-1"),
    ("host", "PUB", "serve.host.host-2.goal"),
    ("host", "PUB", "$KV.serve-snapshots.endpoints.shop.till"),
    ("host", "PUB", f"{CREATE}.deputy"),
    # Admins may deploy, and so anything; yet they take no shorter way than commands.
    ("admin", "SUB", "serve.replica.>"),
    ("admin", "SUB", "_INBOX_proxy.>"),
    ("admin", "PUB", "serve.report.host.host-1"),
    ("admin", "PUB", "serve.host.host-1.goal"),
    ("admin", "PUB", "serve.snapshot.endpoints.shop.till"),
    ("admin", "PUB", "$KV.serve-snapshots.endpoints.shop.till"),
    ("admin", "PUB", f"$JS.API.STREAM.DELETE.{BUCKET}"),
]


class Scene:
    """A stack that serves a victim and has a mole in it, and somebody who watches the victim all the time."""

    def __init__(self, stack: LoadedStack, session: aiohttp.ClientSession) -> None:
        self.stack = stack
        self.session = session
        self.answered = 0
        self.wrong: list[str] = []

    def settings(self, role: str, name: str | None = None) -> BusSettings:
        """What whoever stole that role's file comes with."""
        return bus_settings(self.stack._secrets, self.stack.nats_url, Role(role), name=name)

    async def mole(self, do: str, **arguments: Any) -> dict[str, Any]:
        """What came of an order to the mole."""
        body = json.dumps({"do": do, "with": arguments})
        async with self.session.post(
            f"http://127.0.0.1:{self.stack.http_ports[0]}/mole", data=body
        ) as answer:
            assert answer.status == 200, await answer.text()
            return await answer.json()

    async def as_mole(self) -> BusSettings:
        """All that the mole found out about itself."""
        return msgspec.convert((await self.mole("identity"))["done"], BusSettings)

    async def watch(self) -> None:
        """Ask the victim again and again, at both proxies."""
        while True:
            for port in self.stack.http_ports:
                number = str(self.answered)
                async with self.session.get(f"http://127.0.0.1:{port}/till", params={"n": number}) as answer:
                    text = await answer.text()
                    if answer.status != 200 or json.loads(text) != {"till": number}:
                        self.wrong.append(f"{answer.status} {text[:200]}")
                    self.answered += 1
            await asyncio.sleep(0.02)

    async def state(self) -> Any:
        """What is deployed and who lives, as far as no attempt may change it."""
        deployments = await self.stack.admin.call(ListDeployments())
        status = await self.stack.admin.call(GetStatus())
        replicas = [
            sorted(
                (replica.replica_tag, replica.state)
                for replica in (await self.stack.admin.call(GetDeploymentInfo(name=name))).replicas
            )
            for name in ("shop/till", "evil/mole")
        ]
        return (
            sorted(each.name for each in deployments),
            replicas,
            sorted((host.host_id, host.status) for host in status.hosts),
            sorted((proxy.proxy_id, proxy.status) for proxy in status.proxies),
        )

    async def logged(self, event: str, **fields: object) -> None:
        """Until the leader has logged such a line."""
        leader = await self.stack.leader()
        await eventually(
            lambda: any(line.get("event") == event and fields.items() <= line.items() for line in leader.log),
            within_s=60,
        )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scene(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Scene]:
    async with (
        LoadedStack.running(tmp_path_factory.mktemp("red")) as stack,
        aiohttp.ClientSession() as session,
    ):
        for name, code in (("shop/till", "mole:Till"), ("evil/mole", "mole:Mole")):
            await stack.done(
                await stack.admin.call(
                    Deploy(
                        name=name,
                        replica_config=ReplicaConfig(
                            import_path=code,
                            app_dir=str(APP_DIR),
                            ray_actor_options=RayActorOptions(num_cpus=0.1),
                        ),
                        backend_config=BackendConfig(num_replicas=2),
                        route_prefix=f"/{name.partition('/')[2]}",
                        version="v1",
                    )
                )
            )
        yield Scene(stack, session)


@pytest_asyncio.fixture(loop_scope="module")
async def unharmed(scene: Scene) -> AsyncIterator[None]:
    """Around each attempt: whatever is tried, nothing changes and the victim's callers get its responses."""
    before, asked = await scene.state(), scene.answered
    watching = asyncio.get_running_loop().create_task(scene.watch())
    yield
    async with asyncio.timeout(60):
        while scene.answered < asked + 20 and not watching.done():  # noqa: ASYNC110 - a plain count
            await asyncio.sleep(0.01)
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
        assert scene.wrong == []
        # A host that was only late with a report comes back by itself.
        while await scene.state() != before:  # noqa: ASYNC110 - it is asked
            await asyncio.sleep(0.1)


def _attempts_of(who: str) -> Iterator[tuple[str, str]]:
    return ((verb, subject) for role, verb, subject in FORBIDDEN if role == who)


@pytest.mark.parametrize("who", ["replica", "client", "proxy", "host", "admin", "view", "operate"])
async def test_nats_refuses_and_logs_what_is_none_of_a_roles_business(scene: Scene, unharmed, who: str):
    settings = await scene.as_mole() if who == "replica" else scene.settings(who)
    allowed = []
    async with Intruder.connected(settings) as intruder:
        for verb, subject in _attempts_of(who):
            if not await intruder.is_refused(verb, subject):
                allowed.append(f"{verb} {subject}")
    assert allowed == []
    log = scene.stack.log("nats")
    words = {"PUB": "Publish Violation", "SUB": "Subscription Violation"}
    lines = [line for line in log.splitlines() if "Violation" in line]
    unseen = [
        subject
        for verb, subject in _attempts_of(who)
        if not any(words[verb] in line and f'"{subject}"' in line for line in lines)
    ]
    assert unseen == []


READ_BUCKET = json.dumps({"seq": 1, "next_by_subj": f"$KV.{SUBJECTS.bucket}.>", "batch": 1}).encode()


@pytest.mark.parametrize("who", ["replica", "client", "proxy", "admin", "operate"])
async def test_what_answers_a_reader_of_the_bucket_or_a_caller_commands_and_reports_nothing(
    scene: Scene, unharmed, who: str
):
    """JetStream answers readers, a gateway callers, and both choose where the answer goes."""
    settings = await scene.as_mole() if who == "replica" else scene.settings(who)
    called = "serve.call.evil.mole" if who == "replica" else "serve.call.shop.till"
    history = len(await scene.stack.admin.call(GetHistory()))
    async with Intruder.connected(settings) as intruder:
        for reply in (
            "serve.admin.shutdown",
            "serve.admin.delete_deployment",
            "serve.report.host.host-1",
            "serve.report.proxy.proxy-1",
            "serve.host.host-1.goal",
            "serve.snapshot.endpoints.shop.till",
            "serve.replica.shop.till.1",
            "serve.models.shop.till.1",
            "serve.wake.shop.till",
        ):
            if who != "admin":
                await intruder.publish(f"$JS.API.DIRECT.GET.{BUCKET}", READ_BUCKET, reply)
                await intruder.publish(f"$JS.API.STREAM.INFO.{BUCKET}", b"", reply)
            if who != "proxy":
                await intruder.publish(called, b'{"do": "environment"}', reply)
    # A command from here is behind all that the deputies could have sent.
    assert len(await scene.stack.admin.call(GetHistory())) == history


async def test_a_model_learns_no_secret_of_its_host(scene: Scene):
    environment = (await scene.mole("environment"))["done"]
    told = [
        name
        for name, value in environment.items()
        if (name.startswith("MUSTER_") and name.endswith(("_FILE", "PASSWORD", "TOKEN", "SEED")))
        or str(scene.stack._secrets.directory) in value
    ]
    assert told == []
    credentials = (await scene.as_mole()).credentials
    assert isinstance(credentials, UserIdentity), "one user, and no key that makes others"


async def test_a_model_calls_nobody_whom_it_may_not(scene: Scene, unharmed):
    answer = await scene.mole("call", name="shop/till")
    assert "may_call" in answer["refused"], answer


async def test_replies_of_others_cannot_be_guessed(scene: Scene, unharmed):
    """The mole knows the prefix of each proxy's inbox, and how replies to it were named."""
    async with Intruder.connected(await scene.as_mole()) as intruder:
        for proxy in ("proxy-1", "proxy-2"):
            prefix = f"{inbox_prefix(Role.PROXY, proxy)}"
            for number in range(3000):
                guess = base64.urlsafe_b64encode(os.urandom(9)).decode().replace("-", "a").replace("_", "b")
                await intruder.client.publish(f"{prefix}.{guess}.{number}", b"\x90<h1>mine</h1>")
                await intruder.client.publish(f"{prefix}.{number}", b"\x90<h1>mine</h1>")
        await intruder.client.flush(timeout=60)


async def test_who_has_a_hosts_key_speaks_for_no_host_that_lives(scene: Scene, unharmed):
    """The key makes any host's name; the name belongs to the process that reports under it."""
    before = len(await scene.stack.admin.call(GetHistory()))
    for target in ("host-1", "host-2"):
        async with Intruder.connected(scene.settings("host", target)) as intruder:
            for seq in (1, 2**40):
                report = {
                    "host_id": target, "incarnation": "f" * 32, "seq": seq, "started_at": 4e9, "epoch": 0,
                    "generation": 0, "resources": {"CPU": 64.0}, "replicas": [], "leaving": True,
                }  # fmt: skip
                for payload in (
                    json.dumps(report),
                    json.dumps({**report, "leaving": False}),
                    json.dumps({**report, "resources": {"CPU": 1e308}}),
                    json.dumps({**report, "epoch": 2**62}),
                ):
                    await intruder.publish(f"serve.report.host.{target}", payload.encode())
    await scene.logged("message_refused")
    assert len(await scene.stack.admin.call(GetHistory())) == before


async def test_who_has_a_proxys_key_speaks_for_no_proxy_that_lives(scene: Scene, unharmed):
    for target in ("proxy-1", "proxy-2"):
        async with Intruder.connected(scene.settings("proxy", target)) as intruder:
            for payload in (
                {
                    "proxy_id": target,
                    "applied_snapshot_id": 2**53,
                    "leaving": True,
                    "incarnation": "f" * 32,
                    "seq": 2**40,
                    "started_at": 4e9,
                },
                {"proxy_id": target, "applied_snapshot_id": 2**62, "incarnation": "f" * 32},
                {"proxy_id": "proxy-9"},
            ):
                await intruder.publish(f"serve.report.proxy.{target}", json.dumps(payload).encode())
    await scene.logged("message_refused")
