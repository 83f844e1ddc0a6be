"""Every subcommand of `muster` once against a real controller: what it prints for programs, and its exit code."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import pytest_asyncio
import typer.main
from typer.core import TyperGroup
from typer.testing import CliRunner, Result

from muster.cli.main import app
from muster.cli.session import Session
from tests.support.servers.nats_server import NatsServer
from tests.support.servers.postgres_server import PostgresServer
from tests.support.stacks.admin_desk import TRACEBACK, AdminDesk

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.usefixtures("quiet"),
]

BUILT = typer.main.get_command(app)
RUN: set[tuple[str, ...]] = set()
"""Subcommands that this module has run."""
NOT_ABOUT_THE_ADMIN_API = {
    *((word,) for word in ("up", "secrets", "call", "help", "init", "completion")),
    *((word,) for word in ("run", "build", "start", "config", "shutdown")),  # by test_serve_commands
    *(("context", word) for word in ("add", "list", "use", "show", "remove")),
    *(("console", "user", word) for word in ("add", "set-password", "remove", "list")),
}


class Muster:
    """The program, run in this process beside the hosts and the proxy that answer it."""

    def __init__(self, desk: AdminDesk, url: str, directory: Path) -> None:
        self.desk = desk
        self.directory = directory
        self.environment = {"MUSTER_NATS_URL": url, "MUSTER_SUBJECT_PREFIX": desk.subjects.prefix}

    async def run(self, *arguments: str, given: str | None = None) -> Result:
        """One run of `muster`."""
        words = [word for word in arguments[:2] if word.replace("-", "").isalpha() and word[0] != "-"]
        RUN.update({tuple(words[:1]), tuple(words)})
        session = Session(environment=self.environment, directory=self.directory)

        def invoke() -> Result:
            return CliRunner().invoke(app, arguments, obj=session, input=given, catch_exceptions=False)

        return await asyncio.to_thread(invoke)

    async def ok(self, *arguments: str) -> Any:
        """The JSON of a run that succeeds."""
        result = await self.run(*arguments, "--json")
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    async def fails(self, code: int, *arguments: str) -> tuple[Any, str]:
        """The JSON and the words for people of a run that ends with that exit code."""
        result = await self.run(*arguments, "--json")
        assert result.exit_code == code, result.output
        return json.loads(result.stdout), result.stderr


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(shared_server: NatsServer, postgres_server: PostgresServer) -> AsyncIterator[AdminDesk]:
    async with AdminDesk.opened(shared_server, postgres_server) as desk:
        yield desk


@pytest.fixture
def muster(
    shared: AdminDesk, shared_server: NatsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Muster:
    # The runner would build all commands anew for every run.
    monkeypatch.setattr("typer.testing._get_command", lambda _app: BUILT)
    (tmp_path / "code").mkdir()
    return Muster(shared, shared_server.url, tmp_path)


def deploy(name: str, version: str, *more: str, code: str = "model:Model") -> list[str]:
    return ["deploy", code, "--name", name, "--version", version, "--app-dir", "code", *more]


async def test_deploy_look_scale_roll_back_and_delete(muster: Muster) -> None:
    first = await muster.ok(*deploy("digits", "1", "--route-prefix", "/digits"))
    assert (first["result"], first["deployment"]["version"]) == ("succeeded", "1")
    again = await muster.ok(*deploy("digits", "1", "--route-prefix", "/digits"))
    assert (again["result"], again["goal_id"]) == ("unchanged", first["goal_id"])
    accepted = await muster.ok(*deploy("digits", "2", "--route-prefix", "/digits", "--no-wait"))
    assert accepted["result"] == "accepted"
    waited = await muster.ok("goal", "wait", accepted["goal_id"])
    assert waited == {"goal_id": accepted["goal_id"], "status": "succeeded", "error": "", "message": ""}

    assert (await muster.ok("scale", "digits", "3"))["result"] == "succeeded"
    info = await muster.ok("info", "digits")
    assert (info["status"], info["version"], len(info["replicas"])) == ("healthy", "2", 3)
    assert "default/digits" in [d["name"] for d in await muster.ok("list")]
    status = await muster.ok("status")
    assert [h["host_id"] for h in status["hosts"]] == ["host-1", "host-2"]
    assert (await muster.ok("status", "digits"))["name"] == "default/digits"

    assert [r["version"] for r in await muster.ok("revisions", "digits")] == ["2", "1"], "scaling is none"
    assert (await muster.ok("rollback", "digits"))["result"] == "succeeded"
    assert (await muster.ok("info", "digits"))["version"] == "1"
    assert (await muster.ok("delete", "digits"))["result"] == "succeeded"
    assert await muster.ok("list") == []
    assert [d["status"] for d in await muster.ok("list", "--deleted")] == ["deleted"]
    assert (await muster.ok("delete", "digits"))["result"] == "unchanged"


async def test_applications(muster: Muster) -> None:
    deployments = [{"name": n, "replica_config": {"import_path": "model:Model"}} for n in ("front", "model")]
    file = muster.directory / "shop.yaml"
    file.write_text(json.dumps({"name": "shop", "ingress": "front", "deployments": deployments}))
    different = await muster.run("diff", "shop.yaml", "--json")
    assert (different.exit_code, json.loads(different.stdout)[0]["plan"]["updating"]) == (1, True)
    assert (await muster.ok("app", "deploy", "-f", "shop.yaml"))["result"] == "succeeded"
    checks = {
        check["part"]: check["outcome"] for check in json.loads((await muster.run("doctor", "--json")).stdout)
    }
    assert [checks[part] for part in ("nats", "controller", "postgres", "hosts", "versions")] == ["ok"] * 5
    file.write_text(json.dumps({"name": "shop", "ingress": "front", "deployments": deployments[:1]}))
    assert (await muster.ok("app", "deploy", "-f", "shop.yaml"))["result"] == "succeeded"
    assert len(await muster.ok("app", "history", "shop")) == 2
    assert (await muster.ok("app", "rollback", "shop"))["result"] == "succeeded"
    (shop,) = await muster.ok("app", "list")
    assert shop["deployments"] == ["shop/front", "shop/model"]
    assert (await muster.ok("app", "delete", "shop"))["result"] == "succeeded"
    assert await muster.ok("app", "list") == []


async def test_backends_endpoints_and_traffic(muster: Muster) -> None:
    for name in ("v1", "v2"):
        made = await muster.ok("backend", "create", name, "model:Model", "--app-dir", "code")
        assert made["result"] == "succeeded"
    assert (await muster.ok("endpoint", "create", "fork", "v1", "--route-prefix", "/fork"))[
        "result"
    ] == "succeeded"
    assert (await muster.ok("traffic", "set", "fork", "v1=0.9", "v2=0.1"))["result"] == "succeeded"
    assert (await muster.ok("endpoint", "show", "fork"))["traffic"] == {"default/v1": 0.9, "default/v2": 0.1}
    assert (await muster.ok("traffic", "rollback", "fork"))["result"] == "succeeded"
    assert (await muster.ok("endpoint", "show", "fork"))["traffic"] == {"default/v1": 1.0}
    assert (await muster.ok("traffic", "rollback", "fork"))["result"] == "succeeded"
    assert (await muster.ok("endpoint", "show", "fork"))["traffic"] == {"default/v1": 0.9, "default/v2": 0.1}
    await muster.fails(4, "endpoint", "show", "absent")
    assert (await muster.ok("traffic", "shadow", "fork", "v2", "0.5"))["result"] == "succeeded"
    options = ("--backend-header", "X-To", "--relative-slo-ms", "250")
    assert (await muster.ok("endpoint", "update", "fork", *options))["result"] == "succeeded"
    endpoint = next(e for e in await muster.ok("endpoint", "list") if e["endpoint_tag"] == "default/fork")
    assert (endpoint["options"]["backend_header"], endpoint["options"]["relative_slo_ms"]) == ("X-To", 250.0)
    assert endpoint["traffic"] == {"default/v1": 0.9, "default/v2": 0.1}
    assert endpoint["shadows"] == {"default/v2": 0.5}

    file = {
        "backends": [{"name": "v3", "replica_config": {"import_path": "model:Model", "app_dir": "code"}}],
        "endpoints": [
            {"name": "fork", "traffic": {"v1": 0.5, "v3": 0.5}},
            {"name": "third", "traffic": {"v3": 1}},
        ],
    }
    (muster.directory / "traffic.json").write_text(json.dumps(file))
    assert len(await muster.ok("apply", "traffic.json", "--dry-run")) == 5
    outcomes = [each["outcome"]["result"] for each in await muster.ok("apply", "traffic.json")]
    assert outcomes == ["succeeded"] * 5, "a backend, traffic, options, the end of a shadow, an endpoint"
    endpoint = next(e for e in await muster.ok("endpoint", "list") if e["endpoint_tag"] == "default/fork")
    assert endpoint["traffic"] == {"default/v1": 0.5, "default/v3": 0.5}
    assert (endpoint["shadows"], endpoint["options"]["backend_header"]) == ({}, "")
    again = await muster.ok("apply", "traffic.json")
    assert {each["outcome"]["result"] for each in again} == {"unchanged"}

    refused, words = await muster.fails(2, "backend", "delete", "v1")
    assert refused["error"]["code"] == "conflict"
    assert "used by the endpoint 'default/fork'" in words

    changes = ("--num-replicas", "2", "--circuit-breaker", "window_s=20,open_time_s=1")
    assert (await muster.ok("update", "v1", *changes))["result"] == "succeeded"
    config = (await muster.ok("backend", "show", "v1"))["backend_config"]
    assert (config["num_replicas"], config["circuit_breaker"]["window_s"]) == (2, 20.0)
    assert config["circuit_breaker"]["failure_percent"] == 50.0, "what was not given stays"
    for name in ("fork", "third"):
        assert (await muster.ok("endpoint", "delete", name))["result"] == "succeeded"
    assert (await muster.ok("backend", "delete", "v1", "--force-kill"))["result"] == "succeeded"
    left = {b["backend_tag"] for b in await muster.ok("backend", "list")}
    assert "default/v1" not in left
    assert "default/v2" in left


async def test_hosts_proxies_and_options(muster: Muster) -> None:
    assert (await muster.ok("host", "drain", "host-2"))["result"] == "succeeded"
    assert [h["draining"] for h in await muster.ok("host", "list")] == [False, True]
    assert (await muster.ok("host", "undrain", "host-2"))["result"] == "succeeded"
    assert (await muster.ok("http", "update", "--request-timeout-s", "7"))["result"] == "succeeded"
    assert (await muster.ok("http", "show"))["request_timeout_s"] == 7.0
    (proxy,) = await muster.ok("proxy", "list")
    assert proxy["applied_snapshot_id"] > 0


async def test_autoscaling_is_listed_paused_and_resumed_and_a_person_wins_over_it(muster: Muster) -> None:
    limits = ("--autoscaling-config", "min_replicas=1,max_replicas=3")
    assert (await muster.ok(*deploy("followed", "1", *limits)))["result"] == "succeeded"
    assert (await muster.ok("autoscaling", "pause", "followed"))["result"] == "succeeded"
    assert (await muster.ok("autoscaling", "pause", "followed"))["result"] == "unchanged"
    assert (await muster.ok("autoscaling", "resume", "followed"))["result"] == "succeeded"
    assert (await muster.ok("scale", "followed", "2"))["result"] == "succeeded"
    (view,) = await muster.ok("autoscaling", "list")
    assert (view["backend_tag"], view["num_replicas"], view["paused"]) == ("default/followed", 2, "scale")
    refused, _ = await muster.fails(2, "scale", "followed", "4")
    assert refused["error"]["field"] == "num_replicas"
    assert (await muster.ok("delete", "followed"))["result"] == "succeeded"


async def test_rollouts_are_started_listed_watched_and_changed(muster: Muster) -> None:
    """Nobody sends requests here, so nothing is shown and each step waits for a person."""
    assert (await muster.ok(*deploy("rolled", "1", "--route-prefix", "/rolled")))["result"] == "succeeded"
    refused, _ = await muster.fails(4, "rollout", "pause", "rolled")
    assert refused["error"]["code"] == "not_found"
    started = await muster.ok(
        "rollout", "start", "rolled", "--version", "2", "--steps", "5%,50%,100%", "--no-wait"
    )
    assert started["result"] == "accepted"
    await until_in_force(muster, 0)
    assert (await muster.ok("rollout", "pause", "rolled"))["result"] == "succeeded"
    (view,) = await muster.ok("rollout", "list")
    assert (view["backend_tag"], view["version"], view["state"]) == ("default/rolled", "2", "paused")
    assert (await muster.ok("rollout", "pause", "rolled"))["result"] == "unchanged"
    assert (await muster.ok("rollout", "resume", "rolled"))["result"] == "succeeded"
    assert (await muster.ok("rollout", "step", "rolled"))["result"] == "succeeded"
    await until_in_force(muster, 1)
    aborted = await muster.ok("rollout", "abort", "rolled", "--reason", "odd")
    assert aborted["result"] == "succeeded"
    watched = await muster.run("rollout", "watch", "rolled", "--json")
    last = json.loads(watched.stdout.splitlines()[-1])
    assert (watched.exit_code, last["outcome"], last["reason"]) == (1, "aborted", "by command: odd")

    refused, _ = await muster.fails(2, "rollout", "start", "rolled", "--version", "2")
    assert refused["error"]["code"] == "conflict"
    again = await muster.ok("rollout", "start", "rolled", "--version", "2", "--again", "--no-wait")
    assert (await muster.ok("rollout", "promote", "rolled"))["result"] == "succeeded"
    assert (await muster.ok("goal", "wait", again["goal_id"]))["status"] == "succeeded"
    assert (await muster.ok("info", "rolled"))["version"] == "2"
    assert (await muster.ok("delete", "rolled"))["result"] == "succeeded"


async def until_in_force(muster: Muster, step: int) -> None:
    """Until requests of the only rollout go by that step."""
    async with asyncio.timeout(60):
        while True:
            (view,) = await muster.ok("rollout", "list")
            if view["step"] == step and view["is_in_force"]:
                return


async def test_captures_are_set_listed_read_and_ended(muster: Muster) -> None:
    """What is captured by real proxies, and replayed, is `test_captures`' matter."""
    assert (await muster.ok(*deploy("watched", "1", "--route-prefix", "/watched")))["result"] == "succeeded"
    options = ("--bodies", "--redact", "$.user", "--redact-header", "X-User")
    assert (await muster.ok("capture", "set", "watched", "1%", *options))["result"] == "succeeded"
    assert (await muster.ok("capture", "set", "watched", "1%", *options))["result"] == "unchanged"
    (view,) = await muster.ok("capture", "list")
    assert (view["endpoint_tag"], view["capture"]["share"]) == ("default/watched", 0.01)
    refused, _ = await muster.fails(2, "capture", "set", "watched", "0%")
    assert refused["error"]["field"] == "SHARE"
    assert await muster.ok("capture", "show", "watched") == []
    await muster.ok(*deploy("another", "1"))
    refused, words = await muster.fails(4, "replay", "watched", "--against", "another")
    assert refused["error"]["code"] == "not_found"
    assert "nothing was captured" in words
    assert (await muster.ok("capture", "off", "watched"))["result"] == "succeeded"
    assert await muster.ok("capture", "list") == []
    for name in ("watched", "another"):
        assert (await muster.ok("delete", name))["result"] == "succeeded"


async def test_logs_and_the_table_of_loads_are_there_for_programs_too(muster: Muster) -> None:
    lines: list[Any] = []
    async with asyncio.timeout(60):
        while not lines:  # it waits a moment only for those who remember
            result = await muster.run(
                "logs", "--no-follow", "--tail", "5", "--service", "controller", "--json"
            )
            assert result.exit_code == 0, result.output
            lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert {line["service"] for line in lines} == {"controller"}
    table = await muster.ok("top", "--once", "--interval-s", "0.2")
    assert isinstance(table, dict)


async def test_what_happened_and_who_did_it(muster: Muster) -> None:
    await muster.ok(*deploy("audited", "1"))
    (entry,) = await muster.ok("history", "audited")
    assert (entry["verb"], entry["subject"]) == ("deploy", "default/audited")
    assert "@" in entry["principal"]
    kinds: set[str] = set()
    async with asyncio.timeout(60):
        while not {"audit", "replica"} <= kinds:  # they go another way than the answers
            kinds = {event["kind"] for event in await muster.ok("events", "audited")}


async def test_a_backup_is_written_and_restored(muster: Muster) -> None:
    assert (await muster.ok(*deploy("kept", "1")))["result"] == "succeeded"
    written = await muster.ok("backup", "kept.muster")
    file = muster.directory / "kept.muster"
    assert (written["file"], written["size_bytes"]) == ("kept.muster", file.stat().st_size)
    refused, _ = await muster.fails(2, "backup", "kept.muster")
    assert refused["error"]["field"] == "FILE", "it is not replaced by chance"

    assert (await muster.ok(*deploy("kept", "2")))["result"] == "succeeded"
    tried = await muster.ok("restore", "kept.muster", "--dry-run")
    assert tried == await muster.ok("plan", "restore", "kept.muster")
    assert tried["updating"]
    declined = await muster.run("restore", "kept.muster", given="n\n")
    assert declined.exit_code == 1
    assert (await muster.ok("info", "kept"))["version"] == "2"
    restored = await muster.ok("restore", "kept.muster", "--yes")
    assert restored["goal_ids"] != []
    assert (restored["failed"], restored["pending"]) == ({}, [])
    assert (await muster.ok("info", "kept"))["version"] == "1"
    file.write_bytes(b"no backup")
    refused, words = await muster.fails(2, "restore", "kept.muster", "--yes")
    assert refused["error"]["code"] == "bad_field"
    assert "no backup of Muster's" in words


async def test_a_plan_and_a_dry_run_tell_the_same_and_change_nothing(muster: Muster) -> None:
    await muster.ok(*deploy("planned", "1"))
    planned = await muster.ok("plan", "scale", "planned", "3")
    assert [r["action"] for r in planned["replicas"]] == ["start", "start"]
    assert await muster.ok("scale", "planned", "3", "--dry-run") == planned
    assert len((await muster.ok("info", "planned"))["replicas"]) == 1
    refused, _ = await muster.fails(4, "plan", "rollback", "nobody")
    assert refused["error"]["code"] == "not_found"


async def test_exit_codes_tell_scripts_what_went_wrong(muster: Muster) -> None:
    failed, words = await muster.fails(
        1, *deploy("broken", "1", "--max-constructor-retry-count", "1", code="model:Broken")
    )
    assert (failed["result"], failed["error"]) == ("failed", TRACEBACK)
    assert "ValueError: no weights" in words
    bad, words = await muster.fails(2, *deploy("broken", "1", "--num-replicas", "-1"))
    assert "num" in bad["error"]["field"]
    assert words.startswith("error: ")
    missing, _ = await muster.fails(4, "info", "nobody")
    assert missing["error"] == {
        "code": "not_found",
        "message": "name: there is no deployment 'default/nobody'",
    }
    late, _ = await muster.fails(5, *deploy("crowd", "1", "--num-replicas", "900", "--timeout-s", "0.2"))
    assert late["result"] == "pending"
    late, _ = await muster.fails(5, "goal", "wait", late["goal_id"], "--timeout-s", "0")
    assert late["status"] == "pending"
    unknown, _ = await muster.fails(4, "goal", "wait", "g99999")
    assert "never given" in unknown["error"]["message"]


async def test_the_program_by_itself_is_run_as_people_run_it(muster: Muster) -> None:
    """In a process of its own, and with tables for people."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MUSTER_")}

    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "muster.cli.main", "status", "--format", "table"],
            env={**environment, **muster.environment, "COLUMNS": "120"},
            cwd=muster.directory,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )

    done = await asyncio.to_thread(run)
    assert done.returncode == 0, done.stderr
    assert "host-1" in done.stdout
    assert "proxy-1" in done.stdout


async def test_delete_all_asks_first_and_then_empties_everything(muster: Muster) -> None:
    refused = await muster.run("delete-all", given="n\n")
    assert refused.exit_code == 1
    assert await muster.ok("backend", "list") != []
    done = await muster.ok("delete-all", "--yes")
    assert (done["result"], len(done["goal_ids"]) > 0) == ("succeeded", True)
    assert await muster.ok("backend", "list") == []


async def test_this_module_has_run_every_subcommand() -> None:
    """A command that is added must be added here."""
    if len(RUN) < 20:
        pytest.skip("only some of the module was run")
    assert set(_commands(BUILT)) - NOT_ABOUT_THE_ADMIN_API <= RUN


def _commands(command: click.Command, *words: str) -> Iterator[tuple[str, ...]]:
    if not isinstance(command, TyperGroup):
        yield words
        return
    for name, inner in command.commands.items():
        yield from _commands(inner, *words, name)
