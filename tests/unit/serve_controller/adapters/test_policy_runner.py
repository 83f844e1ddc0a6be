"""Users' policy functions in their own process: what they may return, and what becomes of those that misbehave."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from serve_common.config.autoscaling import AutoscalingContext, AutoscalingPolicy, LoadPoint
from serve_controller.adapters.policy_runner import SubprocessPolicies, child_environment
from serve_controller.ports import PolicyFailed, PolicyResult
from tests.support.waiting import eventually, let_pass

SOURCE = """
import asyncio, ctypes, math, os, sys, time
import muster as serve

def by_load(context: serve.AutoscalingContext, per_replica=2):
    return math.ceil(context.total_num_requests / per_replica)

def counts(context):
    asked = context.policy_state.get("asked", 0) + 1
    return context.samples[-1].seen, {}

def remembers(context):
    return 3, {"asked": context.policy_state.get("asked", 0) + 1}

def prints(context):
    print("something", flush=True); os.write(1, b'{"num_replicas": 99}\\n'); sys.stdout.write("no newline")
    return 1

def reads_input(context):
    return len(sys.stdin.read())

def fails(context):
    return inner(context)

def inner(context):
    return 1 / 0

def spins(context):
    open("spinning", "w").close()
    while True: pass

def leaves(context):
    sys.exit(3)

def crashes(context):
    sys.stderr.write("about to crash\\n"); os._exit(7)

def eats(context):
    return len(bytearray(800 * 1024 * 1024))

def environment(context):
    return len([name for name in os.environ if name.startswith("MUSTER_")])

def descriptors(context):
    return len([name for name in os.listdir("/proc/self/fd") if int(name) > 2])

def returns(context, what): return {"float": 2.5, "endless": float("inf"), "text": "3", "none": None,
    "true": True, "negative": -1, "triple": (1, {}, 2), "state": (1, [])}[what]

def process(context):
    return os.getpid()

async def later(context):
    return 1

number = 3
"""


def context(**changes: object) -> AutoscalingContext:
    fields: dict[str, object] = {
        "deployment_name": "model",
        "app_name": "default",
        "current_num_replicas": 2,
        "target_num_replicas": 2,
        "total_num_requests": 7.0,
        "total_queued_requests": 1.0,
        "capacity_adjusted_min_replicas": 1,
        "capacity_adjusted_max_replicas": 10,
        "policy_state": {},
        "last_scale_up_time": None,
        "last_scale_down_time": 5.0,
        "current_time": 100.0,
        "samples": [LoadPoint(at=99.0, seen=7.0, burst=8.0, queued=1.0, source="scrape")],
        **changes,
    }
    return AutoscalingContext(**fields)  # type: ignore[arg-type]  # tests change single fields


@pytest.fixture
def app_dir(tmp_path: Path) -> Path:
    (tmp_path / "policies.py").write_text(SOURCE)
    return tmp_path


@pytest.fixture(autouse=True)
def _busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is tested here are no times."""
    for name in ("policy_runner.START_TIMEOUT_S", "policy_runner._WAIT_S"):
        monkeypatch.setattr(f"serve_controller.adapters.{name}", 40.0)
    monkeypatch.setattr("serve_controller.adapters.policy_runner._STACK_WAIT_S", 20.0)


@pytest.fixture
async def runner(app_dir: Path) -> AsyncIterator[SubprocessPolicies]:
    runner = SubprocessPolicies(str(app_dir.parent), call_timeout_s=30.0)
    yield runner
    await runner.close()


Ask = Callable[..., "Answering"]


class Answering:
    """Asks functions of the app_dir."""

    def __init__(self, runner: SubprocessPolicies, app_dir: str) -> None:
        self._runner = runner
        self._app_dir = app_dir

    async def __call__(self, function: str, **kwargs: object) -> PolicyResult:
        policy = AutoscalingPolicy(policy_function=f"policies:{function}", policy_kwargs=kwargs)
        return await self._runner.run(policy, self._app_dir, context())

    async def failure(self, function: str, **kwargs: object) -> str:
        with pytest.raises(PolicyFailed) as failed:
            await self(function, **kwargs)
        return str(failed.value)


@pytest.fixture
def ask(runner: SubprocessPolicies, app_dir: Path) -> Answering:
    return Answering(runner, app_dir.name)


async def test_a_policy_gets_its_context_and_kwargs_and_says_a_number(ask: Answering) -> None:
    assert await ask("by_load") == PolicyResult(num_replicas=4)
    assert await ask("by_load", per_replica=7) == PolicyResult(num_replicas=1)


async def test_a_policy_may_return_what_it_is_given_next_time(
    runner: SubprocessPolicies, app_dir: Path
) -> None:
    policy = AutoscalingPolicy(policy_function="policies:remembers")
    first = await runner.run(policy, str(app_dir), context())
    second = await runner.run(policy, str(app_dir), context(policy_state=first.policy_state))
    assert (first.policy_state, second.policy_state) == ({"asked": 1}, {"asked": 2})


async def test_what_a_policy_prints_and_reads_does_not_disturb_it(ask: Answering) -> None:
    assert (await ask("prints")).num_replicas == 1
    assert (await ask("reads_input")).num_replicas == 0
    assert (await ask("prints")).num_replicas == 1


async def test_one_process_is_kept_for_all_functions_of_an_app_dir(ask: Answering) -> None:
    assert await ask("process") == await ask("process")


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("endless", "returned inf replicas"),
        ("text", "returned '3', a str"),
        ("none", "returned None, a NoneType"),
        ("true", "returned True, a bool"),
        ("negative", "returned -1 replicas"),
        ("triple", "a tuple of 3; it must be (number, policy_state)"),
        ("state", "returned a list as policy_state; it must be a dict"),
    ],
)
async def test_what_is_no_number_of_replicas_is_refused_with_words(
    ask: Answering, what: str, said: str
) -> None:
    assert said in await ask.failure("returns", what=what)


async def test_a_fraction_of_a_replica_is_a_number_of_replicas(ask: Answering) -> None:
    assert (await ask("returns", what="float")).num_replicas == 2.5


async def test_a_policy_that_raises_fails_with_its_own_traceback(ask: Answering) -> None:
    failure = await ask.failure("fails")
    assert "in inner\n    return 1 / 0" in failure
    assert failure.endswith("ZeroDivisionError: division by zero")
    assert "policy_child" not in failure


async def until_it_spins(app_dir: Path) -> None:
    await eventually((app_dir / "spinning").exists)


async def test_a_policy_that_hangs_is_ended_and_the_next_one_answered(ask: Answering, app_dir: Path) -> None:
    async with asyncio.TaskGroup() as tasks:
        failing = tasks.create_task(ask.failure("spins"))
        await until_it_spins(app_dir)
        let_pass(30.0)
    failure = failing.result()
    assert failure.endswith("policies:spins took more than 30 s")
    assert "in spins" in failure
    assert (await ask("by_load")).num_replicas == 4


async def test_one_that_is_slow_to_say_where_it_hangs_is_waited_for(
    ask: Answering, runner: SubprocessPolicies, app_dir: Path
) -> None:
    async with asyncio.TaskGroup() as tasks:
        failing = tasks.create_task(ask.failure("spins"))
        await until_it_spins(app_dir)
        (home,) = runner._workers.values()
        assert home._child is not None
        child = home._child._process
        child.send_signal(signal.SIGSTOP)
        let_pass(30.0)
        await asyncio.sleep(0.3)
        assert not failing.done()
        child.send_signal(signal.SIGCONT)
    assert "in spins" in failing.result()
    assert (await ask("by_load")).num_replicas == 4


async def test_one_that_nobody_waits_for_any_more_does_not_answer_the_next(
    ask: Answering, app_dir: Path
) -> None:
    async with asyncio.TaskGroup() as tasks:
        asking = tasks.create_task(ask("spins"))
        await until_it_spins(app_dir)
        asking.cancel()
    assert (await ask("by_load")).num_replicas == 4


async def test_functions_of_one_app_dir_wait_for_one_another(ask: Answering) -> None:
    answers = await asyncio.gather(*(ask("by_load", per_replica=number) for number in (1, 7)))
    assert [answer.num_replicas for answer in answers] == [7, 1]


async def test_a_policy_that_ends_or_exhausts_its_process_harms_nobody_else(ask: Answering) -> None:
    assert "SystemExit: 3" in await ask.failure("leaves")
    crashed = await ask.failure("crashes")
    assert "exited with code 7" in crashed
    assert "about to crash" in crashed
    assert "MemoryError" in await ask.failure("eats")
    assert (await ask("by_load")).num_replicas == 4


async def test_async_functions_and_what_is_no_function_are_refused(ask: Answering) -> None:
    assert "async function" in await ask.failure("later")
    assert "no function but a int" in await ask.failure("number")
    assert "has no nothing" in await ask.failure("nothing")


async def test_a_policy_sees_neither_settings_nor_files_of_the_controller(
    ask: Answering, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MUSTER_POSTGRES_PASSWORD", "secret")
    held = os.open(os.devnull, os.O_RDONLY)
    os.set_inheritable(held, True)
    assert (await ask("environment")).num_replicas == 0
    # Two pipes to its parent, and what lists the descriptors.
    assert (await ask("descriptors")).num_replicas == 3
    os.close(held)


def test_only_what_a_python_process_needs_is_passed_on() -> None:
    passed = child_environment({"PATH": "/bin", "MUSTER_NATS_PASSWORD": "secret", "AWS_SECRET": "secret"})
    assert passed["PATH"] == "/bin"
    assert "secret" not in passed.values()


async def test_a_changed_file_is_imported_anew(ask: Answering, app_dir: Path) -> None:
    assert (await ask("by_load")).num_replicas == 4
    (app_dir / "policies.py").write_text("def by_load(context): return 9\n")
    assert (await ask("by_load")).num_replicas == 9


async def test_an_app_dir_that_is_not_there_is_named(runner: SubprocessPolicies) -> None:
    with pytest.raises(PolicyFailed, match="nowhere is not a directory that the controller can see"):
        await runner.run(AutoscalingPolicy(policy_function="policies:by_load"), "/nowhere", context())


async def test_the_process_that_was_used_longest_ago_makes_room(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "policies.py").write_text(SOURCE)
    runner = SubprocessPolicies(str(tmp_path), call_timeout_s=30.0, children_max=1)
    try:
        first, other = Answering(runner, "a"), Answering(runner, "b")
        before = await first("process")
        assert await first("process") == before
        await other("process")
        assert await first("process") != before
    finally:
        await runner.close()
