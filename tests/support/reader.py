"""A person who follows a page: writes its files and runs its commands, in order, as they are printed.

A command that no test runs stands in `NOT_EXECUTED` with the reason, and a page with commands in one of the lists of
pages: `tests/unit/test_docs.py` fails for one that is in neither. What is started for the pages is the tests' own.
"""

from __future__ import annotations

import ast
import asyncio
import functools
import itertools
import os
import re
import shlex
import ssl
import subprocess
import sys
import textwrap
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import nats
from nats.errors import Error as NatsError
from typer.testing import CliRunner

from muster.cli.main import app as cli
from tests.support.documents import Block, Command, Page

ON_AN_EMBEDDED_STACK: Final = (
    "README.md",
    "examples/README.md",
    "examples/digits/README.md",
    "docs/how-to/deploy.md",
    "docs/how-to/applications.md",
    "docs/how-to/traffic.md",
    "docs/how-to/rollouts.md",
    "docs/how-to/worse-models.md",
    "docs/how-to/replay.md",
    "docs/how-to/autoscaling.md",
    "docs/how-to/handles.md",
    "docs/how-to/batching-and-multiplexing.md",
    "docs/how-to/streaming-and-asgi.md",
    "docs/how-to/observe.md",
    "docs/how-to/backup.md",
    "docs/how-to/http-options.md",
    "docs/how-to/command-line.md",
    "docs/how-to/nats-clients.md",
    "docs/coming-from-ray-serve.md",  # the last one: it ends with a shutdown, which deletes everything
)
"""Pages for `tests/integration/test_docs.py`, in the order in which one stack bears them."""

IN_CONTAINERS: Final = (
    "docs/how-to/compose.md",
    "docs/how-to/upgrade.md",
    "docs/how-to/alerts.md",
    "docs/runbook.md",
)
"""Pages for `tests/compose/test_docs.py`, in order."""

BY_TESTS_OF_THEIR_OWN: Final = (
    "docs/how-to/ray-cluster.md",
    "docs/how-to/https.md",
    "docs/how-to/existing-services.md",
    "docs/how-to/secure.md",
)
"""Pages that need an empty stack, another one or none, in `tests/integration/test_docs.py`."""

WITH_COMMANDS_IN_SENTENCES: Final = ("docs/runbook.md",)
"""Pages whose commands are within their sentences; in all others those are only checked for being there."""

_NO_ALERTMANAGER: Final = (
    "needs Alertmanager's image, which may be out of reach; test_alertmanager.py has its binary"
)
_NO_GRAFANA: Final = "names its files itself, so it starts Grafana, whose image may be out of reach"
_NO_JAEGER: Final = "needs Jaeger's image, which may be out of reach"
_A_NAME: Final = "is named as a program, not as something to type here"
_ENDLESS: Final = "goes on until Ctrl-C"
_DO_NOT: Final = "is there as what not to do"
_PLACEHOLDER: Final = "has a placeholder for what only the situation knows"
_NO_ROOM: Final = "wants more replicas or hosts than the machine of these tests has room for"
_NO_ROLLOUT: Final = "needs a rollout that is under way; rollouts.md has it, with one"
_CUTS: Final = "cuts every connection to the stack that all compose tests share"

NOT_EXECUTED: Final[Mapping[str, Mapping[str, str]]] = {
    "README.md": {
        "make run": "what the stack of these tests is started like",
        "make test": "runs this very test",
    },
    "docs/how-to/alerts.md": {
        "cp -r deploy/alertmanager /etc/muster-alerts": "writes below /etc of the machine",
        "docker compose --profile alerts up -d --build --wait": _NO_ALERTMANAGER,
        "docker compose exec alertmanager amtool check-config /etc/alertmanager/alertmanager.yml": _NO_ALERTMANAGER,
        "docker compose kill --signal HUP alertmanager": _NO_ALERTMANAGER,
        "docker compose exec alertmanager amtool alert add MusterTest severity=warning "
        "--alertmanager.url=http://127.0.0.1:9093": _NO_ALERTMANAGER,
    },
    "docs/how-to/https.md": {
        "docker compose -f compose.yaml -f deploy/ingress/tls.yaml up -d --build --wait": _NO_GRAFANA,
    },
    "docs/how-to/observe.md": {
        "MUSTER_OTLP_ENDPOINT=http://jaeger:4318 docker compose --profile tracing up -d --build --wait": _NO_JAEGER,
    },
    "docs/runbook.md": {
        "muster up": _A_NAME,
        "muster scale": _A_NAME,
        "muster top": _ENDLESS,
        "muster logs": _ENDLESS,
        "muster logs digits --level warning": _ENDLESS,
        "muster logs digits--canary": _ENDLESS,
        "muster deploy": _A_NAME,
        "muster rollout watch digits": _NO_ROLLOUT,
        "muster rollout step digits": _NO_ROLLOUT,
        "muster rollout abort digits": _NO_ROLLOUT,
        "muster scale digits 6": _NO_ROOM,
        "muster scale digits 2": "would wait for a second host, once `max_replicas_per_host` is 1",
        "muster deploy … --num-cpus 1": _PLACEHOLDER,
        "muster restore FILE": "asks; backup.md has it with --yes",
        "muster console user set-password NAME": "asks for a password; tests/unit/muster/cli/test_console.py sets one",
        "muster secrets --rotate ROLE": "secure.md has it, for a stack that is not shared",
        "docker compose up -d --no-recreate --scale replica-host=2": "compose.md has it, with more",
        "docker compose up -d --scale controller=2": "compose.md has it, with more",
        "docker compose up -d --no-recreate --scale proxy=2": "compose.md has it, with more",
        "docker restart CONTAINER": "restarts a proxy, as `docker compose restart proxy` does",
        "docker compose restart SERVICE": "`docker compose restart proxy` is one of them",
        "docker compose restart nats": _CUTS,
        "docker compose up -d --force-recreate nats": _CUTS,
        "docker compose up -d --force-recreate": _CUTS,
        "docker compose down -v": _DO_NOT,
    },
}
"""Of each page, the commands that no test runs, and why."""

STATED_URL: Final = "http://127.0.0.1:8000"
STATED_NATS_URL: Final = "nats://127.0.0.1:4222"
COMMAND_LIMIT_S: Final = 100.0
CONTAINERS_LIMIT_S: Final = 300.0


class Reader:
    """A person with one page open, a terminal in a directory of their own, and the checkout's programs on the path."""

    def __init__(
        self,
        followed: Page,
        folder: Path,
        environment: Mapping[str, str] | None = None,
        *,
        instead: Mapping[str, str] | None = None,
    ) -> None:
        """``instead``: what stands where the page has an address, a path or a word of its own."""
        self.page = followed
        self.folder = folder
        self.environment = {"XDG_CONFIG_HOME": str(folder / "config"), **(environment or {})}
        self.instead = instead or {}
        self.printed = ""
        """By the last command."""
        self._background: list[subprocess.Popen[bytes]] = []

    def follow(self) -> None:
        """Write the page's files and run its commands, in order; what runs beside them is ended then."""
        try:
            self._follow()
        finally:
            for process in self._background:
                process.kill()
                process.wait(timeout=COMMAND_LIMIT_S)

    def _follow(self) -> None:
        for block in self.page.blocks():
            if block.file_name:
                self.write(block)
            elif block.language == "sh":
                self.run(block)
            elif block.language == "python" and _awaits(block.text):
                program = "import asyncio\nasync def main():\n{}\nasyncio.run(main())\n"
                self._execute(
                    [sys.executable, "-c", self._here(program.format(textwrap.indent(block.text, "    ")))]
                )
        if self.page.name in WITH_COMMANDS_IN_SENTENCES:
            self.run(self.page.inline_commands())

    def write(self, block: Block) -> None:
        """Write a block that is a whole file."""
        file = self.folder / block.file_name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(self._here(block.text))

    def run(self, block: Block) -> None:
        """Run the block's commands but those that are listed as not executed."""
        left_out = NOT_EXECUTED.get(self.page.name, {})
        commands = list(block.commands())
        for number, command in enumerate(commands, 1):
            if str(command) not in left_out:
                self._run(command, block.exit_code if number == len(commands) else 0)

    def _run(self, command: Command, expected: int) -> None:
        words = [self._here(word) for word in command.words]
        if command.is_background:
            assert words[0] == "python", f"who runs {shlex.join(words)} beside the others?"
            variables = {**os.environ, **self.environment, **command.variables}
            with (self.folder / "background.log").open("ab") as log:
                arguments = [sys.executable, *words[1:]]
                process = subprocess.Popen(arguments, env=variables, cwd=self.folder, stdout=log, stderr=log)
            self._background.append(process)
            return
        match Path(words[0]).name:
            case "muster":
                done = CliRunner().invoke(cli, words[1:], env=self.environment | command.variables)
                self.printed, told = done.output, done.exit_code
                if words[1] == "diff" and told == 1:
                    told = 0  # what it says of a file that would change something
                assert told == expected, f"{shlex.join(words)}\n{done.output}{done.exception!r}"
            case "curl":
                fetch(words[1:], self.folder)
            case "nats":
                change = Command(["muster", "update", "digits", "--max-queued-requests", "99"])
                change_something = functools.partial(self._run, change, 0)
                asyncio.run(use_nats(words[1:], self.folder, self._here(STATED_NATS_URL), change_something))
            case "python":
                self._execute([sys.executable, *words[1:]])
            case "source":
                self._execute(["bash", "-ec", " ".join(words)])
            case "export":
                self._execute(["bash", "-ec", f"{' '.join(words)}\nenv --null"])
                variables = self.printed.rstrip("\0").split("\0")
                self.environment |= dict(line.split("=", 1) for line in variables)
            case "openssl" | "psql":
                self._execute(words, command.variables)
            case "docker" | "make":
                self._execute(words, command.variables, limit_s=CONTAINERS_LIMIT_S)
            case "grep" | "sort" | "uniq" if command.is_piped:
                may_find_nothing = (0, 1) if words[0] == "grep" else (0,)
                self._execute(words, given=self.printed, accepted=may_find_nothing)
            case _:
                raise AssertionError(f"who runs {shlex.join(words)}? See NOT_EXECUTED")

    def _here(self, text: str) -> str:
        """The text with what stands here instead of the page's own addresses and words."""
        for stated, actual in self.instead.items():
            text = re.sub(rf"(?<!\w){re.escape(stated)}(?!\w)", lambda _, actual=actual: actual, text)
        return text

    def _execute(
        self,
        words: Sequence[str],
        variables: Mapping[str, str] | None = None,
        *,
        given: str = "",
        accepted: Sequence[int] = (0,),
        limit_s: float = COMMAND_LIMIT_S,
    ) -> None:
        done = subprocess.run(
            words,
            input=given,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=limit_s,
            env={**os.environ, **self.environment, **(variables or {})},
            cwd=self.folder,
            check=False,
        )
        self.printed = done.stdout
        assert done.returncode in accepted, (
            f"{shlex.join(words)}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        )


def _awaits(program: str) -> bool:
    """It awaits outside of any function, as in a notebook."""
    try:
        compile(program, "", "exec", dont_inherit=True)
    except SyntaxError:
        compile(program, "", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT | ast.PyCF_ONLY_AST)
        return True
    return False


def fetch(words: Sequence[str], folder: Path) -> None:
    """What curl does in ``folder`` with the options that pages use. Raises for a status that is no success."""
    request, trust = urllib.request.Request(words[-1]), None
    for option, value in itertools.pairwise(words):
        if option == "-H":
            request.add_header(*value.split(": "))
        elif option == "--data-binary":
            file = value.removeprefix("@")
            request.data = (folder / file).read_bytes() if file != value else value.encode()
        elif option == "--cacert":
            trust = ssl.create_default_context(cafile=folder / value)
    with urllib.request.urlopen(request, timeout=COMMAND_LIMIT_S, context=trust) as response:
        assert response.read()


async def use_nats(
    words: Sequence[str], folder: Path, url: str, change_something: Callable[[], None]
) -> None:
    """What the program ``nats``, which neither PyPI nor Debian has, does with the commands that pages use.

    Who subscribes must see a message once something has changed.
    """
    options = dict(itertools.pairwise(words))
    refusals: list[Exception] = []

    async def refused(error: Exception) -> None:
        refusals.append(error)

    connection = await nats.connect(
        url,
        user_credentials=str(folder / options["--creds"]),
        inbox_prefix=options.get("--inbox-prefix", "_INBOX").encode(),
        allow_reconnect=False,
        error_cb=refused,
    )
    try:
        if "request" in options:
            headers = dict([options["--header"].split(": ")]) if "--header" in options else None
            reply = await connection.request(options["request"], words[-1].encode(), 30, headers=headers)
            assert "Nats-Service-Error" not in (reply.headers or {}), (words, reply.headers, reply.data)
        else:
            subscription = await connection.subscribe(options["subscribe"])
            await connection.flush()
            await asyncio.to_thread(change_something)
            assert (await subscription.next_msg(30)).data
        assert not refusals, (words, refusals)
    except NatsError as error:
        raise AssertionError(f"nats {shlex.join(words)}: {error!r}") from error
    finally:
        await connection.close()
