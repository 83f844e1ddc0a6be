"""The contract with user code: import, construct, call, reconfigure, check, cancel."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from serve_common.config.replica import ReplicaConfig
from serve_common.names import BackendTag, replica_tag
from serve_common.protocol.reports import ReplicaGoal
from serve_replica_host.replica.telemetry.traces import error_line, user_traceback
from serve_replica_host.replica.user.code import UserCode, UserCodeUnusable

APP = """
import asyncio, threading
released = threading.Event()
entered = threading.Event()

class Async:
    def __init__(self, a, b=2):
        self.a, self.b, self.config = a, b, None
    async def reconfigure(self, user_config):
        self.config = user_config
    async def __call__(self, request):
        return [request, self.a, self.b, self.config, threading.current_thread().name]

class Plain:
    def __call__(self, request):
        return threading.current_thread().name
    async def check_health(self):
        raise OSError("disk")

class NotCallable:
    pass

class Deep:
    def __init__(self):
        try:
            helper()
        except KeyError as error:
            raise ValueError("broken model") from error

def helper():
    raise KeyError("weights")

async def function(request):
    return request

def nothing():
    return "nothing taken"

def blocking(request):
    entered.set()
    released.wait(40)
    return "late"

VALUE = 3
"""


@pytest.fixture
def app_dir(tmp_path: Path) -> Iterator[str]:
    (tmp_path / "unit_user_app.py").write_text(APP)
    (tmp_path / "unit_broken_app.py").write_text("def f(:\n")
    yield str(tmp_path)
    sys.modules.pop("unit_user_app", None)
    if str(tmp_path) in sys.path:
        sys.path.remove(str(tmp_path))


def goal(attribute: str, **changes: Any) -> ReplicaGoal:
    config = ReplicaConfig(
        import_path=attribute if ":" in attribute else f"unit_user_app:{attribute}",
        init_args=changes.pop("init_args", []),
        init_kwargs=changes.pop("init_kwargs", {}),
    )
    backend = BackendTag("default/a")
    fields: dict[str, Any] = {
        "replica_tag": replica_tag(backend, 1),
        "backend_tag": backend,
        "replica_config": config,
        "config_version": 1,
        "max_concurrent_queries": 2,
        "graceful_shutdown_timeout_s": 1.0,
        "health_check_period_s": 1.0,
        "health_check_timeout_s": 1.0,
        "start_timeout_s": 1.0,
    }
    return ReplicaGoal(**(fields | changes))


async def test_a_class_is_constructed_with_its_arguments_and_reconfigured_before_it_serves(
    app_dir: str,
) -> None:
    code = await UserCode.construct(
        goal("Async", init_args=[1], init_kwargs={"b": 5}, user_config={"t": 1}), app_dir
    )

    answer = await code.call("request")

    assert answer == ["request", 1, 5, {"t": 1}, threading.current_thread().name]


async def test_plain_code_runs_in_a_thread_and_async_functions_on_the_loop(app_dir: str) -> None:
    plain = await UserCode.construct(goal("Plain"), app_dir)
    function = await UserCode.construct(goal("function"), app_dir)

    assert (await plain.call("x")).startswith("user")
    assert await function.call("x") == "x"
    plain.discard()


async def test_a_function_that_takes_nothing_is_called_with_nothing(app_dir: str) -> None:
    code = await UserCode.construct(goal("nothing"), app_dir)

    assert await code.call("x") == "nothing taken"
    code.discard()


@pytest.mark.parametrize(
    ("attribute", "changes", "reason"),
    [
        ("NotCallable", {}, "has no __call__"),
        ("VALUE", {}, "neither a class nor a function"),
        ("Absent", {}, "has no Absent"),
        ("function", {"init_args": [1]}, "takes no init_args"),
        ("Plain", {"user_config": 1}, "has no reconfigure"),
    ],
)
async def test_what_cannot_be_served_says_why(
    app_dir: str, attribute: str, changes: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UserCodeUnusable, match=reason):
        await UserCode.construct(goal(attribute, **changes), app_dir)


async def test_a_missing_app_dir_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserCodeUnusable, match="not a directory that the replica host can see"):
        await UserCode.construct(goal("Async"), str(tmp_path / "absent"))


async def test_health_is_what_the_users_method_says_and_good_without_one(app_dir: str) -> None:
    sick = await UserCode.construct(goal("Plain"), app_dir)
    well = await UserCode.construct(goal("function"), app_dir)

    with pytest.raises(OSError, match="disk"):
        await sick.check_health()
    await well.check_health()


async def test_cancelling_a_plain_call_ends_only_when_its_thread_does(app_dir: str) -> None:
    code = await UserCode.construct(goal("blocking"), app_dir)
    user_app = sys.modules["unit_user_app"]
    async with asyncio.TaskGroup() as group:
        work = group.create_task(code.call("x"))
        await asyncio.to_thread(user_app.entered.wait, 30)
        work.cancel()
        done, _ = await asyncio.wait([work], timeout=0.05)
        assert not done
        user_app.released.set()
    assert work.cancelled()
    code.discard()


async def test_a_discarded_object_is_let_go(app_dir: str) -> None:
    code = await UserCode.construct(goal("function"), app_dir)

    code.discard()

    with pytest.raises(UserCodeUnusable, match="stopped"):
        await code.call("x")


async def test_a_traceback_shows_the_users_frames_and_causes_and_none_of_ours(app_dir: str) -> None:
    with pytest.raises(ValueError, match="broken model") as raised:
        await UserCode.construct(goal("Deep"), app_dir)

    text = user_traceback(raised.value)

    assert text.startswith("Traceback") or "KeyError: 'weights'" in text
    assert "in helper" in text
    assert "The above exception was the direct cause" in text
    assert text.endswith("ValueError: broken model")
    assert "serve_replica_host" not in text


async def test_a_syntax_error_and_a_missing_module_need_no_frames(app_dir: str) -> None:
    with pytest.raises(SyntaxError) as syntax:
        await UserCode.construct(goal("unit_broken_app:App"), app_dir)
    with pytest.raises(ModuleNotFoundError) as missing:
        await UserCode.construct(goal("no_such_module_here:App"), app_dir)

    assert "unit_broken_app.py" in user_traceback(syntax.value)
    assert user_traceback(missing.value).endswith(
        "ModuleNotFoundError: No module named 'no_such_module_here'"
    )
    assert "importlib" not in user_traceback(missing.value)


def test_an_error_is_one_line_of_bounded_length() -> None:
    assert error_line(ValueError("x")) == "ValueError: x"
    assert error_line(KeyError()) == "KeyError"
    assert len(error_line(ValueError("x" * 5000))) == 1000
