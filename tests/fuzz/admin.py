"""Generated admin calls to a real controller on a real NATS and Postgres, with a host that starts replicas at once.

What must hold of each: an answer comes, it is no internal error, and a refused command has changed nothing in the
checkpoint. At the end the controller still leads and has logged no error.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import tempfile
import time
import types
import typing
from collections import Counter
from pathlib import Path
from typing import Any, Final

import asyncpg
import msgspec

from serve_common.api.queries import COMMANDS, VERBS
from serve_common.api.views import ErrorView
from tests.support.servers.nats_server import NatsServer
from tests.support.servers.postgres_server import PostgresServer
from tests.support.stacks.control_plane import ControlPlane

_GUARD_S: Final = 120.0
_SLOW_S: Final = 60.0
"""An answer that takes as long hangs, whatever else the machine does; ``timeout_s`` of what waits is short."""
_TRIALS: Final = 100
NAMES: Final = ("a", "b", "app/a", "app/b", "default/a", "host-1", "nobody")
ODD: Final[tuple[Any, ...]] = (
    None, True, "", " ", "a b", "a/b/c", "../x", "*", ">", "a.b", "x" * 300, "\x00", "\x1b[31m", "\u202e", "😀", "é",
    0, -1, 2**63, -(2**63), 10**30, 1.5, -0.0, 1e308, 1e-308, [], {}, [[]], {"": ""}, [None] * 50, {"a": {"b": {}}},
)  # fmt: skip


class Calls:
    """Draws calls."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.request_ids: list[str] = ["again"]

    def draw(self) -> tuple[str, bytes]:
        """A verb and a payload."""
        rng = self.rng
        verb = (
            rng.choice(list(VERBS)) if rng.random() < 0.98 else rng.choice(("nothing", "Deploy", "deploy.x"))
        )
        if verb == "shutdown" and rng.random() < 0.9:
            verb = "deploy"
        request = self.value(VERBS[verb], "") if verb in VERBS else {}
        kind = rng.random()
        if kind < 0.35:
            changes = 0
        elif kind < 0.9:
            changes = rng.randint(1, 3)
        else:
            return verb, self.garbage(request)
        for _ in range(changes):
            request = self.changed(request)
        return verb, json.dumps(request, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")

    def garbage(self, request: Any) -> bytes:
        """What is no JSON, or not the JSON that it seems to be."""
        rng = self.rng
        whole = json.dumps(request).encode()
        deep = rng.choice((100, 2_000, 100_000))
        return rng.choice(
            (
                b"",
                b"null",
                b"[]",
                b"{",
                b"\xff\xfe",
                whole[: rng.randint(0, len(whole))],
                b"{}" * 2,
                whole + b"}",
                b"[" * deep + b"]" * deep,
                b'{"name":' * deep + b"1" + b"}" * deep,
                rng.randbytes(40),
                b'"' + b"a" * 200_000 + b'"',
                b'{"name":"a","name":"b"}',
                b'{"num_replicas": NaN}',
                b'{"num_replicas": 1' + b"0" * 5000 + b"}",
                b'{"name":"\\ud800"}',
                b'{"name": "a\x00b"}',
                whole.replace(b'"', b"'"),
            )
        )

    def value(self, kind: Any, name: str) -> Any:
        """Something of that type, mostly such as is accepted."""
        rng = self.rng
        origin, arguments = typing.get_origin(kind), typing.get_args(kind)
        if origin is typing.Annotated:
            return self.value(arguments[0], name)
        if origin in (typing.Union, types.UnionType):
            return self.value(rng.choice(arguments), name)
        if origin is typing.Literal:
            return rng.choice(arguments)
        if origin in (list, tuple, set, frozenset) or kind in (list, tuple):
            item = arguments[0] if arguments else str
            return [self.value(item, name) for _ in range(rng.choice((0, 1, 1, 2)))]
        if origin is dict or kind is dict:
            key, item = arguments or (str, int)
            return {
                str(self.value(key, name)): self.value(item, name) for _ in range(rng.choice((0, 1, 1, 2)))
            }
        return self.simple(kind, name)

    def simple(self, kind: Any, name: str) -> Any:
        """Something of a type without arguments."""
        rng = self.rng
        if isinstance(kind, typing.NewType):
            return self.value(kind.__supertype__, name)
        if kind is msgspec.UNSET or kind is msgspec.UnsetType:
            return None
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            return {
                each.encode_name: self.value(each.type, each.encode_name)
                for each in msgspec.structs.fields(kind)
                if each.required or rng.random() < 0.25
            }
        if isinstance(kind, type) and hasattr(kind, "__members__"):
            return rng.choice([member.value for member in kind])
        if kind is bool:
            return rng.random() < 0.5
        if kind is int:
            return rng.choice((0, 1, 1, 2, 3, 100))
        if kind is float:
            return rng.choice((0.0, 0.1, 0.5, 1.0, 1.0, 2.0, 5.0)) if name != "timeout_s" else 0.1
        if kind is str:
            return self.text(name)
        return rng.choice((1, "a", {}, [1]))

    def text(self, name: str) -> str:
        rng = self.rng
        if name == "request_id":
            if rng.random() < 0.4:
                return rng.choice(self.request_ids[-50:])
            self.request_ids.append(f"r{rng.getrandbits(32)}")
            return self.request_ids[-1]
        if name == "import_path":
            return "model:Model"
        if "route" in name or "prefix" in name:
            return rng.choice(("/", "/a", "/a/b", "/c"))
        if name.startswith("host"):
            return "host-1"
        if "method" in name:
            return rng.choice(("GET", "POST"))
        return rng.choice(NAMES)

    def changed(self, value: Any) -> Any:
        """The same with one thing at some depth made wrong."""
        rng = self.rng
        if isinstance(value, dict) and value and rng.random() < 0.9:
            key = rng.choice(list(value))
            drawn = rng.random()
            if drawn < 0.6:
                return {**value, key: self.changed(value[key])}
            if drawn < 0.75:
                return {each: item for each, item in value.items() if each != key}
            if drawn < 0.85:
                return {**value, rng.choice(("nothing", key + "s", key.upper(), "\x00")): rng.choice(ODD)}
            return {**value, key: rng.choice(ODD)}
        if isinstance(value, list) and value and rng.random() < 0.7:
            at = rng.randrange(len(value))
            return [*value[:at], self.changed(value[at]), *value[at + 1 :]]
        return rng.choice(ODD)


class Outcome:
    """What came of it all."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self.counts: Counter[str] = Counter()
        self.slowest_s = 0.0


class World:
    """The instance, and what is known of its database."""

    def __init__(self, plane: ControlPlane, store: asyncpg.Connection) -> None:
        self.plane = plane
        self.store = store
        self.outcome = Outcome()

    async def checkpoint(self) -> set[tuple[str, str, str]]:
        """All of it, but for what says when."""
        rows = await self.store.fetch("SELECT kind, key, value::text AS value FROM muster.checkpoint_rows")
        return {(row["kind"], row["key"], row["value"]) for row in rows}

    async def call(self, verb: str, payload: bytes) -> tuple[int, ErrorView | None, float]:
        """Status (200 when it was done), what an error says, and how long it took."""
        began = time.monotonic()
        message = await self.plane.client.request(self.plane.subjects.admin(verb), payload, timeout=_GUARD_S)
        taken_s = time.monotonic() - began
        headers = message.headers or {}
        code = headers.get("Nats-Service-Error-Code")
        if code is None:
            msgspec.json.decode(message.data)
            return 200, None, taken_s
        return int(code), msgspec.json.decode(message.data, type=ErrorView), taken_s

    async def try_one(self, verb: str, payload: bytes, label: str) -> None:
        """Make a call and judge it."""
        outcome = self.outcome
        before = await self.checkpoint() if verb in COMMANDS else set()
        status, error, taken_s = await self.call(verb, payload)
        outcome.counts[str(status)] += 1
        outcome.slowest_s = max(outcome.slowest_s, taken_s)
        told = f"{label}: {verb} {payload[:300]!r}: {status} {error}"
        if status == 500 or (error is not None and error.code == "internal"):
            outcome.found.append(told)
        if taken_s > _SLOW_S:
            outcome.found.append(f"{told} after {taken_s:.1f} s")
        if verb not in COMMANDS or status == 200 or await self.checkpoint() == before:
            return
        # Something else may have been under way, for replicas come and go: what a refused command changes, it changes
        # each time.
        changed: set[tuple[str, str, str]] = set()
        for _ in range(_TRIALS):
            await asyncio.sleep(0.05)
            before = await self.checkpoint()
            status, error, _ = await self.call(verb, payload)
            changed = await self.checkpoint() ^ before
            if status == 200 or not changed:
                return
        kinds = sorted({(kind, key) for kind, key, _ in changed})
        outcome.found.append(f"{told} has changed {kinds}")


async def fuzz(seed: int, count: int, nats: NatsServer, postgres: PostgresServer) -> Outcome:
    """``count`` calls one after another."""
    async with ControlPlane.opened(nats, postgres) as plane:
        controller = await plane.start_controller("controller-1")
        await plane.until_led_by("controller-1")
        store = await asyncpg.connect(plane._dsn, password=plane._password, timeout=30)
        try:
            world, calls = World(plane, store), Calls(seed)
            for verb in VERBS:  # as it may be sent, each at least once
                if verb not in COMMANDS:
                    await world.try_one(verb, json.dumps(calls.value(VERBS[verb], "")).encode(), verb)
            for number in range(count):
                verb, payload = calls.draw()
                await world.try_one(verb, payload, f"seed {seed} call {number}")
            await plane.until_led_by("controller-1")
        finally:
            await store.close()
        outcome = world.outcome
        if controller.exit_code is not None:
            outcome.found.append(f"the controller ended with {controller.exit_code}")
        outcome.found += [
            f"the controller logged {line}"
            for line in controller.log
            if line.get("level") in ("error", "critical")
        ][:10]
        return outcome


def main(seed: int, count: int) -> int:
    """The long run; the exit code is 1 when something was found."""
    with (
        tempfile.TemporaryDirectory() as directory,
        NatsServer(Path(directory)) as nats,
        PostgresServer() as postgres,
    ):
        postgres.start()
        outcome = asyncio.run(fuzz(seed, count, nats, postgres))
    for line in outcome.found[:20]:
        print(line[:1500], file=sys.stderr)
    print(
        f"{count} admin calls, answers by status {dict(outcome.counts)}, slowest {outcome.slowest_s:.2f} s, "
        f"{len(outcome.found)} wrong"
    )
    return 1 if outcome.found else 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:3])))
