"""A NATS server of the tests' own, that can be killed and started again."""

from __future__ import annotations

import shutil
import subprocess
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

from nats.aio.client import Client

from serve_common.nats.client import connect_nats
from serve_common.protocol.subjects import Subjects
from serve_common.runtime.settings import BusSettings
from tests.support.servers.reserved_port import HeldPort


class NatsServer:
    """A nats-server with JetStream, on a port of the system's choice that it keeps until `close`."""

    def __init__(self, directory: Path, *, config: str | None = None) -> None:
        """``config`` is the text of its configuration, beside what the command line says."""
        self.directory = directory
        self._config = config
        self._held_port = HeldPort()
        self.port = self._held_port.port
        self.url = f"nats://127.0.0.1:{self.port}"
        self.process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        binary = Path(sysconfig.get_path("scripts")) / "nats-server"
        self.directory.mkdir(parents=True, exist_ok=True)
        arguments = ["-a", "127.0.0.1", "-p", str(self.port), "-js", "-sd", self.directory / "js"]
        if self._config is not None:
            (self.directory / "nats.conf").write_text(self._config)
            arguments += ["-c", self.directory / "nats.conf"]
        log_path = self.directory / "log"
        with log_path.open("ab") as log:
            process = subprocess.Popen(
                [binary, *arguments, "--ports_file_dir", self.directory], stderr=log, stdout=log
            )
        self.process = process
        ports_file = self.directory / f"nats-server_{process.pid}.ports"
        give_up_at = time.monotonic() + 30
        while not ports_file.exists() or not ports_file.read_text():
            assert process.poll() is None, log_path.read_text()
            assert time.monotonic() < give_up_at, log_path.read_text()
            time.sleep(0.01)  # the server has no other way to tell that it listens

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(timeout=10)
            self.process = None

    def close(self) -> None:
        """For good."""
        self.kill()
        self._held_port.release()

    def forget(self) -> None:
        """While it is down: lose everything that JetStream had."""
        assert self.process is None
        shutil.rmtree(self.directory / "js")


async def connected(server: NatsServer, subjects: Subjects, **callbacks: Callable[[], None]) -> Client:
    """A client as the services use it."""
    settings = BusSettings(
        servers=[server.url],
        user="",
        password="",
        inbox_prefix="_INBOX_test",
        subject_prefix=subjects.prefix,
    )
    return await connect_nats(settings, name="test", deadline_s=20.0, **callbacks)


async def until_known(client: Client) -> None:
    """Wait until the server knows everything that ``client`` told it so far, such as its subscriptions.

    Twice, because nats-py writes the PING of a flush ahead of commands that it still holds back: the first PONG can
    come before the server has seen them; the flush itself sends them.
    """
    await client.flush()
    await client.flush()
