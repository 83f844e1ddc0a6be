"""``python -m bench.full_disk``: a `muster up` whose disk fills up, stays full for a minute, and is freed.

`tests/integration/test_storms.py` fills it for a few seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator

import msgspec

from muster.client import connect_stack
from muster.client.admin import AdminClient
from muster.embedded.process import Happened, ProcessEvent
from muster.embedded.stack import EmbeddedStack
from serve_common.api.commands import Deploy
from serve_common.api.views import GoalStatus
from serve_common.config.backend import BackendConfig, RayActorOptions, ReplicaConfig
from serve_common.errors import ServeError
from tests.support.identities import admin_address
from tests.support.loads.steady_load import counted_requests
from tests.support.paths import APPS
from tests.support.servers.reserved_port import ANY_PORTS
from tests.support.servers.small_disk import SmallDisk
from tests.support.waiting import eventually

DISK_MIB = 700
APP_DIR = APPS / "loaded_app"
CHANGE_LIMIT_S = 150.0
CHANGE_WITHIN_S = 5.0
_REQUEST_LIMIT_S = 30.0
_ASK_EVERY_S = 0.05
_FILL_EVERY_S = 0.1
_CHANGE_EVERY_S = 0.3


class Outcome(msgspec.Struct, kw_only=True):
    """What a full disk did."""

    answers: Counter[str] = msgspec.field(default_factory=Counter)
    """Requests by how they ended; ``200`` is good."""
    changes: Counter[str] = msgspec.field(default_factory=Counter)
    """Changes that were asked for while it was full: ``accepted``, or why not."""
    deaths: list[str] = []
    """Processes of the stack that ended."""
    notices: list[str] = []
    """What `muster up` said."""
    change_after_s: float = 0.0
    """From room to a change that was asked for then having succeeded."""

    def line(self) -> str:
        """All of it, short."""
        return (
            f"requests {dict(self.answers)}; changes while full {dict(self.changes)}; deaths {self.deaths}; "
            f"a change works {self.change_after_s:.1f} s after there is room; told: {self.notices}"
        )


def deploy(version: str) -> Deploy:
    """Two replicas that answer with ``version``."""
    return Deploy(
        name="loaded",
        replica_config=ReplicaConfig(
            import_path="loaded_model:Loaded",
            app_dir=str(APP_DIR),
            init_args=[version],
            ray_actor_options=RayActorOptions(num_cpus=0.5),
        ),
        backend_config=BackendConfig(num_replicas=2, user_config="plain"),
        route_prefix="/loaded",
        version=version,
    )


async def full_for(seconds: float) -> Outcome:
    """Start a stack, fill its disk again and again for ``seconds``, free it, and see what still works.

    Skips the test where no disk can be mounted.
    """
    outcome = Outcome()

    def on_event(event: ProcessEvent) -> None:
        if event.happened is Happened.DIED:
            outcome.deaths.append(f"{event.name}: {event.detail}")

    with SmallDisk.mounted(DISK_MIB) as disk:
        options = msgspec.structs.replace(ANY_PORTS, num_cpus=4)
        stack = EmbeddedStack(disk.root / "s", options, on_event=on_event, on_notice=outcome.notices.append)
        async with stack, _reached(stack, CHANGE_LIMIT_S) as admin, _reached(stack, 0.0) as hasty:
            await _changed(admin, "v1")
            url = f"{stack.record.http_url}/loaded?work_s=0.005"
            async with counted_requests(url, outcome.answers, _ASK_EVERY_S):
                await eventually(
                    lambda: outcome.answers["200"] >= 20, within_s=CHANGE_LIMIT_S, every_s=_ASK_EVERY_S
                )
                await _fill(disk, hasty, seconds, outcome)
                disk.free()
                freed_at = time.monotonic()
                await _changed(admin, "v3")
                outcome.change_after_s = time.monotonic() - freed_at
                # it looks at the disk twice a second
                try:
                    await eventually(
                        lambda: any("has room again" in notice for notice in outcome.notices),
                        within_s=CHANGE_LIMIT_S,
                        every_s=_ASK_EVERY_S,
                    )
                except TimeoutError as error:
                    raise AssertionError(
                        f"nobody was told that there is room again: {outcome.line()}"
                    ) from error
    return outcome


@contextlib.asynccontextmanager
async def _reached(stack: EmbeddedStack, retry_for_s: float) -> AsyncIterator[AdminClient]:
    async with connect_stack(admin_address(stack.record), retry_for_s=retry_for_s) as reached:
        yield reached.admin


async def _changed(admin: AdminClient, version: str) -> None:
    reply = await admin.call(deploy(version))
    if reply.goal_id is not None:
        goal = await admin.wait_for_goal(reply.goal_id, deadline_s=CHANGE_LIMIT_S)
        assert goal.status is GoalStatus.SUCCEEDED, goal


async def _fill(disk: SmallDisk, admin: AdminClient, seconds: float, outcome: Outcome) -> None:
    """Whatever becomes free meanwhile is taken at once; a change is asked for every second.

    It lasts until the stack has noticed, also on a machine that is busy.
    """
    end = time.monotonic() + seconds
    limit = end + CHANGE_LIMIT_S
    change_at = 0.0
    asked: set[asyncio.Task[None]] = set()
    async with asyncio.TaskGroup() as tasks:
        number = 0
        while time.monotonic() < (end if any("is full" in each for each in outcome.notices) else limit):
            await asyncio.to_thread(disk.fill)
            if time.monotonic() >= change_at and len(asked) < 2:
                change_at, number = time.monotonic() + _CHANGE_EVERY_S, number + 1
                task = tasks.create_task(_ask_for_a_change(admin, number, outcome))
                asked.add(task)
                task.add_done_callback(asked.discard)
            await asyncio.sleep(_FILL_EVERY_S)
        for task in asked:
            task.cancel()


async def _ask_for_a_change(admin: AdminClient, number: int, outcome: Outcome) -> None:
    config = BackendConfig(num_replicas=2, user_config=f"full {number}")
    try:
        async with asyncio.timeout(_REQUEST_LIMIT_S):
            await admin.call(msgspec.structs.replace(deploy("v1"), backend_config=config))
        outcome.changes["accepted"] += 1
    except (ServeError, TimeoutError) as error:
        outcome.changes[f"{type(error).__name__}: {str(error)[:160]}"] += 1


def main() -> int:
    """0: nothing ended, no request failed, and a change worked soon after there was room; 1: something did not."""
    parser = argparse.ArgumentParser(prog="python -m bench.full_disk", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long there is no room")
    options = parser.parse_args()
    outcome = asyncio.run(full_for(options.seconds))
    print(outcome.line())
    is_well = set(outcome.answers) == {"200"} and not outcome.deaths
    is_well = is_well and outcome.change_after_s <= CHANGE_WITHIN_S
    print("as promised" if is_well else "NOT as promised")
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())
