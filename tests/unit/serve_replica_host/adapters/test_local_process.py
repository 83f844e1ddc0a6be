"""A process of this machine is killed by the kernel, and nothing else is."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from serve_common.errors import BadField
from serve_common.runtime.settings import Environment
from serve_replica_host.adapters import local_process
from serve_replica_host.adapters.local_process import (
    HostUsers,
    LocalProcess,
    UnixUser,
    choose_users,
    find_user,
    share_directory,
)
from serve_replica_host.adapters.log_socket import LogSocket
from serve_replica_host.adapters.ray_process import RayProcess, runtime_environment
from serve_replica_host.settings import read_host_settings
from tests.unit.serve_replica_host.adapters.test_ray_process import SETTINGS


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        yield process
        process.kill()


def test_a_stopped_process_is_killed(sleeper: subprocess.Popen[bytes]) -> None:
    process = LocalProcess(sleeper.pid)
    sleeper.send_signal(signal.SIGSTOP)

    assert process.kill()
    assert sleeper.wait(10) == -signal.SIGKILL
    assert not process.kill()
    process.close()
    process.close()


def test_a_process_that_was_gone_before_is_said_to_be_gone(sleeper: subprocess.Popen[bytes]) -> None:
    sleeper.kill()
    sleeper.wait(10)

    assert not LocalProcess(sleeper.pid).kill()


@pytest.mark.parametrize("why", ["the system has none", "it may not be opened"])
def test_without_a_handle_the_pid_must_do(
    sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    def forbidden(_pid: int) -> int:
        raise PermissionError("not here")

    if why == "the system has none":
        monkeypatch.setattr(local_process, "_HAS_HANDLES", False)
    else:
        monkeypatch.setattr(os, "pidfd_open", forbidden)
    process = LocalProcess(sleeper.pid)

    assert process.kill()
    assert sleeper.wait(10) == -signal.SIGKILL
    assert not process.kill()


# Changes of user: what is asked for is checked before anything is started, and what is given up stays so.


as_root = pytest.mark.skipif(os.geteuid() != 0, reason="NOT TESTED: a change of user, for this is not root")


def test_a_user_is_a_name_an_id_or_two_ids() -> None:
    nobody = find_user("nobody", "F")
    assert (nobody.name, nobody.uid) == ("nobody", 65534)
    assert find_user("65534", "F") == nobody
    assert find_user("65534:7", "F").gid == 7
    unnamed = find_user("54321", "F")
    assert (unnamed.uid, unnamed.gid, unnamed.home) == (54321, 54321, "/")


@pytest.mark.parametrize(
    "text",
    [
        "root",
        "0",
        "0:5",
        "65534:0",
        "no-such-user",
        "1:x",
        "1:",
        "-1",
        "4294967295",
        "1:4294967295",
        ":5",
        "٣",
    ],
)
def test_what_is_no_user_or_is_root_is_refused_by_the_name_of_its_variable(text: str) -> None:
    with pytest.raises(BadField, match="MUSTER_REPLICA_USER"):
        find_user(text, "MUSTER_REPLICA_USER")


def test_host_and_replicas_may_not_be_told_to_be_the_same() -> None:
    with pytest.raises(BadField, match="another user than MUSTER_HOST_USER"):
        choose_users("nobody", "nobody")


def test_whom_we_are_already_needs_no_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_process.os, "geteuid", lambda: 65534)
    monkeypatch.setattr(local_process, "may_change_user", lambda: False)
    assert choose_users("", "") == choose_users("nobody", "") == choose_users("", "nobody") == HostUsers()


def test_without_the_right_to_it_a_change_of_user_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_process, "may_change_user", lambda: False)
    with pytest.raises(BadField, match="MUSTER_REPLICA_USER: can be another user only where"):
        choose_users("", "54321")
    with pytest.raises(BadField, match="MUSTER_HOST_USER: can be another user only where"):
        choose_users("54321", "")


def test_another_users_replicas_find_nothing_of_the_hosts_in_their_own_directory() -> None:
    told = {"MUSTER_NATS_PASSWORD": "a", "MUSTER_REPLICA_NATS_PASSWORD": "b", "MUSTER_RAY_TEMP_DIR": "/tmp/r"}
    same = read_host_settings(Environment(told | {"MUSTER_HOST_ID": "h"}))
    assert (same.own_dir, same.metrics_dir) == ("/tmp/r", "/tmp/r/metrics-h")
    other = read_host_settings(Environment(told | {"MUSTER_HOST_ID": "h", "MUSTER_REPLICA_USER": "replica"}))
    assert (other.own_dir, other.metrics_dir) == ("/tmp/r-host", "/tmp/r-host/metrics-h")
    assert (other.host_user, other.replica_user) == ("", "replica")


def test_another_user_has_a_home_of_its_own() -> None:
    environment = runtime_environment(
        {"HOME": "/root", "USER": "root", "X": "1"}, UnixUser("r", 7, 7, "/home/r")
    )
    del environment["RUNTIME_ENV_RETRY_TIMES"]
    assert environment == {"HOME": "/home/r", "USER": "r", "LOGNAME": "r", "X": "1"}


def test_a_shared_directory_is_ours_and_no_link(tmp_path: Path) -> None:
    made = tmp_path / "a" / "shared"
    share_directory(made, os.getegid(), 0o1770)
    share_directory(made, os.getegid(), 0o1770)
    assert stat.S_IMODE(made.stat().st_mode) == 0o1770
    link = tmp_path / "link"
    link.symlink_to(made)
    with pytest.raises(OSError, match="not a directory of the host's user"):
        share_directory(link, os.getegid(), 0o710)


def test_the_log_socket_is_for_the_replicas_group_to_write_to() -> None:
    with tempfile.TemporaryDirectory(prefix="ml", dir="/tmp") as directory:
        lines = LogSocket(Path(directory))
        assert lines.bind(os.getegid()) == ""
        found = lines.path.stat()
        lines.close()
    assert (stat.S_IMODE(found.st_mode), found.st_gid) == (0o620, os.getegid())


_BECOME = """
import json, os, sys
from pathlib import Path
from serve_replica_host.adapters.local_process import UnixUser, acting_as, become
from serve_replica_host.adapters.local_process import effective_capabilities, may_change_user
secret, made = Path(sys.argv[1]), Path(sys.argv[2])
host = UnixUser("host", 54321, 54321, "/")
assert may_change_user()
with acting_as(host, 54322):
    assert effective_capabilities() == 0 or os.geteuid() == 0
    made.mkdir()
    os.chown(made, -1, 54322)  # as a member of that group
assert os.geteuid() == 0 and secret.read_text() == "secret"
become(host, 54322)
told = {"uid": os.getresuid(), "gid": os.getresgid(), "groups": os.getgroups()}
for name, attempt in {
    "read": secret.read_text, "be root": lambda: os.setuid(0), "be root's group": lambda: os.setgid(0),
    "have no groups": lambda: os.setgroups([]), "be another": lambda: os.setresuid(7, 7, 7),
}.items():
    try:
        attempt()
        told[name] = "done"
    except PermissionError:
        told[name] = "refused"
status = Path("/proc/self/status").read_text()
rights = [line.split(":") for line in status.splitlines() if line.startswith(("Cap", "NoNew"))]
told["status"] = {name: value.strip() for name, value in rights}
print(json.dumps(told))
"""


@as_root
def test_what_is_given_up_does_not_come_back() -> None:
    with tempfile.TemporaryDirectory(prefix="mu", dir="/tmp") as directory:
        root = Path(directory)
        root.chmod(0o777)
        secret, made = root / "secret", root / "made"
        secret.write_text("secret")
        secret.chmod(0o600)
        done = subprocess.run(
            [sys.executable, "-c", _BECOME, str(secret), str(made)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        found = made.stat()
    told = json.loads(done.stdout)
    assert told["uid"] == told["gid"] == [54321] * 3
    assert told["groups"] == [54322]
    assert (found.st_uid, found.st_gid) == (54321, 54322)
    attempts = ("read", "be root", "be root's group", "have no groups", "be another")
    assert {told[name] for name in attempts} == {"refused"}
    assert {int(told["status"][name], 16) for name in ("CapEff", "CapPrm", "CapInh", "CapAmb")} == {0}
    assert told["status"]["NoNewPrivs"] == "1"


@as_root
def test_a_python_that_the_user_may_not_execute_is_told_as_what_is_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with tempfile.TemporaryDirectory(prefix="mu", dir="/tmp") as directory:
        python = Path(directory) / "python"  # the directory is root's alone
        python.symlink_to(sys.executable)
        monkeypatch.setattr(sys, "executable", str(python))
        with pytest.raises(BadField, match="MUSTER_REPLICA_USER: nobody may not execute"):
            RayProcess(SETTINGS, find_user("nobody", "F"))
