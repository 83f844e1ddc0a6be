"""What user code can do in the replica host's container: it is another user than the host, and has nothing of it."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from muster.secrets import NAMES
from serve_common.identities.roles import Role
from tests.compose.stack import Stack
from tests.support.identities import signing_key

pytestmark = [pytest.mark.compose, pytest.mark.timeout(1200)]

HOST_UID, REPLICA_UID = "10001", "10002"


@pytest.fixture(scope="module")
def hostile(stack: Stack) -> Iterator[Stack]:
    stack.muster(
        "deploy", "hostile:Attacks", "--name", "hostile", "--route-prefix", "/hostile",
        "--app-dir", "/apps/hostile_app", "--num-cpus", "0.1", "--health-check-period-s", "1",
    )  # fmt: skip
    yield stack
    stack.muster("delete", "hostile")


TOKEN = b"eyJ0eXAiOiJKV1QiLCJhbGciOiJlZDI1NTE5LW5rZXkifQ."
"""How the token of any user of NATS begins."""


def ask(stack: Stack, path: str, body: bytes | None = None) -> Any:
    with urllib.request.urlopen(
        urllib.request.Request(stack.http(f"/hostile/{path}"), data=body), timeout=120
    ) as answer:
        return json.load(answer)


def processes(stack: Stack) -> dict[str, dict[str, str]]:
    """``/proc/PID/status`` of the container's processes, by their command lines."""
    script = (
        "for p in /proc/[0-9]*; do tr '\\0' ' ' < $p/cmdline; echo; "
        "grep -E '^(Uid|Gid|CapEff|CapPrm|CapInh|NoNewPrivs):' $p/status; echo --; done 2>/dev/null"
    )
    found = {}
    for block in stack.run("exec", "-T", "replica-host", "sh", "-c", script).split("--\n"):
        command, _, fields = block.strip().partition("\n")
        if fields:
            found[command.strip()] = dict(line.split(":\t", 1) for line in fields.splitlines())
    return found


def test_the_host_is_one_user_and_ray_with_all_user_code_another_and_none_has_a_capability(
    hostile: Stack,
) -> None:
    found = processes(hostile)
    (host,) = [status for command, status in found.items() if command == "python -m serve_replica_host"]
    assert host["Uid"].split() == [HOST_UID] * 4
    rest = {
        command: status
        for command, status in found.items()
        if "raylet" in command
        or command.startswith("ray::")
        or "gcs_server" in command
        or "ray_main" in command
    }
    assert any(command.startswith("ray::ReplicaActor") for command in rest)
    assert {status["Uid"] for status in rest.values()} == {"\t".join([REPLICA_UID] * 4)}
    assert {status["Gid"] for status in rest.values()} == {"\t".join([REPLICA_UID] * 4)}
    for status in (host, *rest.values()):
        assert {status[name] for name in ("CapEff", "CapPrm", "CapInh")} == {"0" * 16}
        assert status["NoNewPrivs"] == "1"


def test_user_code_reads_no_secret_of_the_host_and_cannot_reach_its_process(hostile: Stack) -> None:
    told = ask(hostile, "look")
    assert {name: outcome for name, outcome in told["attempts"].items() if outcome != "refused"} == {}
    assert "read /run/secrets/nats_host" in told["attempts"]
    assert set(map(str, told["uid"])) == set(map(str, told["groups"])) == {REPLICA_UID}
    assert int(told["status"]["CapEff"], 16) == int(told["status"]["CapPrm"], 16) == 0
    assert told["status"]["NoNewPrivs"] == "1"
    secrets = {name: hostile.secrets.read(name) for name in NAMES}
    for environment in told["environments"]:
        assert "/run/secrets" not in environment
        assert [name for name, value in secrets.items() if value in environment] == []


def test_what_user_code_can_read_of_other_processes_has_no_key_of_the_host(hostile: Stack) -> None:
    for role in (Role.HOST, Role.REPLICA):
        found = ask(hostile, "find", signing_key(hostile.secrets, role).seed.encode())
        assert len(found) >= 2  # Ray's, and other replicas'
        assert set(found.values()) == {0}
    tokens = ask(hostile, "find", TOKEN)
    assert sum(tokens.values()) > 0  # it finds what is there


def test_what_is_unpickled_runs_as_the_replicas_user_and_the_host_goes_on(hostile: Stack) -> None:
    ask(hostile, "arm")
    runtime = str(ask(hostile, "look")["runtime"])

    def bombs() -> dict[str, str]:
        """The users that they went off as, by process."""
        return {pid: uid for uid, pid in (line.split() for line in ask(hostile, "bombs") if line)}

    hostile.wait_until(lambda: runtime in bombs(), "Ray's driver has unpickled one", bombs)
    assert set(bombs().values()) == {REPLICA_UID}
    assert any(command == "python -m serve_replica_host" for command in processes(hostile))


def test_what_user_code_leaves_behind_keeps_no_container_from_starting_again(hostile: Stack) -> None:
    assert "ray-moved" in ask(hostile, "wreck")
    hostile.run("restart", "--timeout", "5", "replica-host")
    hostile.wait_for_containers()
    hostile.wait_until_healthy("default/hostile")
    assert ask(hostile, "look")["attempts"]["be root"] == "refused"
