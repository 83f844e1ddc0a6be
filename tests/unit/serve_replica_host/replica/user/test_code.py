"""The contract with user code: import, construct, call, reconfigure, check, cancel."""

from __future__ import annotations

import asyncio
import importlib
import pickle
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import cloudpickle  # type: ignore[import-untyped]  # it ships no hints
import msgspec
import pytest
from structlog.testing import capture_logs

from serve_common.config.backend import BackpressureConfig, ReplicaConfig
from serve_common.dispatch.errors import BackPressureError
from serve_common.errors import BadField, DeadlineExceeded, UserCodeRaised
from serve_common.names import BackendTag
from serve_common.protocol.frames import CallHead, Raised, RequestHead, RequestKind
from serve_common.protocol.reports import ReplicaGoal, ReplicaRank
from serve_common.protocol.snapshots import BackendProtection
from serve_common.runtime.request_context import RequestContext, request_context
from serve_replica_host.replica.io.request import (
    Ended,
    Failed,
    IoEvent,
    Opened,
    Piece,
    ReplicaRequest,
    WholeResponseEvent,
)
from serve_replica_host.replica.process import missing_package_hint
from serve_replica_host.replica.telemetry.traces import error_line, user_traceback
from serve_replica_host.replica.user import python_calls
from serve_replica_host.replica.user.code import UserCode, UserCodeUnusable
from tests.support.replica_rig import build_goal, importable
from tests.support.waiting import eventually

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

class Ranked:
    def __init__(self):
        self.told = []
    async def reconfigure(self, user_config, rank):
        self.told.append((user_config, rank))
    def __call__(self):
        pass

class Plain:
    def __call__(self, request):
        return threading.current_thread().name
    async def check_health(self):
        raise OSError("disk")

class NotCallable:
    def other(self):
        return "other"

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
    with importable(tmp_path, unit_user_app=APP, unit_broken_app="def f(:\n") as directory:
        yield directory


def goal(attribute: str, *, init_args: Any = (), init_kwargs: Any = None, **changes: Any) -> ReplicaGoal:
    path = attribute if ":" in attribute else f"unit_user_app:{attribute}"
    config = ReplicaConfig(import_path=path, init_args=list(init_args), init_kwargs=init_kwargs or {})
    return build_goal(replica_config=config, **changes)


async def test_a_class_is_constructed_with_its_arguments_and_reconfigured_before_it_serves(
    app_dir: str,
) -> None:
    code = await UserCode.construct(
        goal("Async", init_args=[1], init_kwargs={"b": 5}, user_config={"t": 1}), app_dir
    )

    answer = await code.call("request")

    assert answer == ["request", 1, 5, {"t": 1}, threading.current_thread().name]


@pytest.mark.parametrize("user_config", [None, {"t": 1}])
async def test_a_reconfigure_that_takes_a_rank_is_told_it_with_and_without_a_user_config(
    app_dir: str, user_config: object
) -> None:
    first, second = (ReplicaRank(rank=n, node_rank=0, local_rank=n) for n in (3, 1))
    code = await UserCode.construct(goal("Ranked", user_config=user_config, rank=first), app_dir)
    await code.reconfigure(user_config, second)

    assert code.target.told == [(user_config, first), (user_config, second)]


async def test_a_rank_alone_reconfigures_no_code_that_does_not_take_it(app_dir: str) -> None:
    rank = ReplicaRank(rank=0, node_rank=0, local_rank=0)
    code = await UserCode.construct(goal("Async", init_args=[1], rank=rank), app_dir)
    await code.reconfigure(None, rank)

    assert code.target.config is None


async def test_plain_code_runs_in_a_thread_and_async_functions_on_the_loop(app_dir: str) -> None:
    plain = await UserCode.construct(goal("Plain"), app_dir)
    function = await UserCode.construct(goal("function"), app_dir)

    assert (await plain.call("x")).startswith("user")
    assert await function.call("x") == "x"
    plain.discard()


async def test_a_function_that_takes_nothing_is_called_with_nothing(app_dir: str) -> None:
    code = await UserCode.construct(goal("nothing"), app_dir)

    assert await code.call() == "nothing taken"
    code.discard()


@pytest.mark.parametrize(
    ("attribute", "changes", "reason"),
    [
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


async def test_a_class_without_a_call_method_has_its_other_methods(app_dir: str) -> None:
    code = await UserCode.construct(goal("NotCallable"), app_dir)

    assert await code.call(method_name="other") == "other"
    with pytest.raises(BadField, match=r"method '__call__' that does not exist\..* of NotCallable"):
        await code.call("x")
    code.discard()


async def test_a_missing_app_dir_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotADirectoryError, match="not a directory that the replica host can see"):
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
    assert "services/replica-host" not in text


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


# What a handle sends becomes a call of the user's code, and what that returns or raises becomes the answer.


class Halves(ValueError):
    """Pickle keeps one argument, and its making needs two."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(one + two)


class Opaque:
    """Brings an exception into the replica that pickle cannot."""

    held: ClassVar[dict[int, BaseException]] = {}

    def __init__(self, error: BaseException) -> None:
        self.held[id(error)] = error
        self.id = id(error)

    @property
    def error(self) -> BaseException:
        return self.held.pop(self.id)


class Model:
    async def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args, kwargs

    def plain(self, value: int) -> tuple[int, str]:
        return value, threading.current_thread().name

    async def lock(self) -> Any:
        return threading.Lock()

    async def fail(self, error: BaseException | Opaque) -> None:
        raise error.error if isinstance(error, Opaque) else error

    async def halves(self) -> None:
        raise Halves("a", "b")

    async def numbers(self, count: int) -> Any:
        for number in range(count):
            yield number

    def plain_numbers(self, count: int) -> Any:
        yield from range(count)

    async def deadlines(self) -> Any:
        for _ in range(3):
            context = request_context.get()
            yield None if context is None else context.deadline

    async def broken(self) -> Any:
        yield 1
        raise ValueError("after one")

    async def forever(self) -> Any:
        while True:
            yield bytes(100_000)


@pytest.fixture
async def code() -> UserCode:
    model = Model()
    return UserCode(model, model, 4)


def exchange(body: bytes, head: CallHead) -> ReplicaRequest:
    request = RequestHead(RequestKind.PYTHON, "", "", "", "", [], 60.0, len(body), "d/a", "id", call=head)
    made = ReplicaRequest(b"reply", request, 0.0)
    made.body = body
    return made


async def call(code: UserCode, method: str, *args: Any, stream: bool = False, **kwargs: Any) -> list[IoEvent]:
    """Everything that reached the bus side, what ended the exchange last."""
    body = cloudpickle.dumps((args, kwargs))
    return await said(code, exchange(body, CallHead(method, stream=stream)))


async def said(code: UserCode, asked: ReplicaRequest) -> list[IoEvent]:
    out: list[IoEvent] = []
    out.append(await python_calls.handle_call(code, asked, out.append))
    return out


async def value(code: UserCode, method: str, *args: Any, **kwargs: Any) -> Any:
    (answered,) = await call(code, method, *args, **kwargs)
    assert isinstance(answered, WholeResponseEvent), answered
    return pickle.loads(answered.body)


def failure(outcomes: list[IoEvent]) -> tuple[Failed, Raised]:
    failed = outcomes[-1]
    assert isinstance(failed, Failed)
    return failed, msgspec.msgpack.decode(failed.body, type=Raised)


def items(outcomes: list[IoEvent], asked: ReplicaRequest) -> list[Any]:
    """The items that the bus side would send, its pieces joined."""
    data = b"".join(asked.pieces or ()) + b"".join(out.data for out in outcomes if isinstance(out, Piece))
    found = []
    while data:
        size = int.from_bytes(data[:4], "big")
        found.append(pickle.loads(data[4 : 4 + size]))
        data = data[4 + size :]
    return found


async def test_arguments_of_both_kinds_reach_the_method_and_its_value_comes_back(code: UserCode) -> None:
    assert await value(code, "", 1, "two", three=[3]) == ((1, "two"), {"three": [3]})


async def test_a_plain_method_runs_in_a_thread_of_its_own(code: UserCode) -> None:
    number, thread = await value(code, "plain", 5)
    assert number == 5
    assert thread != threading.current_thread().name


async def test_a_function_of_the_callers_own_travels_by_value(code: UserCode) -> None:
    (args, _) = await value(code, "", lambda x: x + 1)
    assert args[0](1) == 2


async def test_a_body_that_cannot_be_unpickled_says_so(code: UserCode) -> None:
    (failed,) = await said(code, exchange(b"cnowhere\nNothing\n.", CallHead()))
    assert isinstance(failed, Failed)
    assert (failed.error_code, failed.status) == (BadField.error_code, 400)
    assert "ModuleNotFoundError: No module named 'nowhere'" in failed.message


@pytest.mark.parametrize("method", ["missing", "__reduce__"])
async def test_a_method_that_is_not_there_is_named(code: UserCode, method: str) -> None:
    (failed,) = await call(code, method)
    assert isinstance(failed, Failed)
    assert failed.error_code == BadField.error_code
    assert method in failed.message


async def test_a_result_that_cannot_be_pickled_says_what_it_is(code: UserCode) -> None:
    failed, raised = failure(await call(code, "lock"))
    assert failed.error_code == UserCodeRaised.error_code
    assert "the returned lock cannot be pickled" in failed.message
    assert "the returned lock cannot be pickled" in raised.traceback
    error = pickle.loads(raised.pickled)
    assert (type(error), str(error)) == (TypeError, "cannot pickle '_thread.lock' object")


async def test_an_exception_travels_as_itself_with_the_users_traceback(code: UserCode) -> None:
    failed, raised = failure(await call(code, "fail", KeyError("digit")))
    assert failed.message == "KeyError: 'digit'"
    restored = pickle.loads(raised.pickled)
    assert isinstance(restored, KeyError)
    assert restored.args == ("digit",)
    assert "raise error" in raised.traceback
    assert "/replica/python_calls.py" not in raised.traceback


async def test_an_exception_that_could_not_be_restored_is_told_in_words(code: UserCode) -> None:
    failed, raised = failure(await call(code, "halves"))
    assert failed.message == "Halves: ab"
    assert raised.pickled == b""
    assert "Halves: ab" in raised.traceback


async def test_an_error_of_a_call_further_down_keeps_its_kind(code: UserCode) -> None:
    full = BackPressureError.of_backend(BackendTag("d/b"), 5, BackendProtection())
    _, raised = failure(await call(code, "fail", Opaque(full)))
    restored = pickle.loads(raised.pickled)
    assert type(restored) is BackPressureError
    assert str(restored) == str(full)


async def test_what_a_call_further_down_ended_with_is_told_with_its_own_status(code: UserCode) -> None:
    config = BackpressureConfig(status_code=429, retry_after_s=7.0)
    full = BackPressureError.of_backend(BackendTag("d/b"), 5, BackendProtection(backpressure_config=config))
    full.is_of_call = True
    with capture_logs() as logs:
        failed, raised = failure(await call(code, "fail", Opaque(full)))
    assert (failed.error_code, failed.status, failed.message) == ("queue_full", 429, str(full))
    assert [line["log_level"] for line in logs] == ["warning"]
    restored = pickle.loads(raised.pickled)
    assert (restored.status, restored.retry_after_s) == (429, 7.0)
    with capture_logs():
        failed, _ = failure(await call(code, "fail", DeadlineExceeded("by the code itself")))
    assert (failed.error_code, failed.status) == ("user_code_raised", 500)


@pytest.mark.parametrize("method", ["numbers", "plain_numbers"])
async def test_a_stream_gives_each_item_after_its_length(code: UserCode, method: str) -> None:
    asked = exchange(cloudpickle.dumps(((5,), {})), CallHead(method, stream=True))
    outcomes = await said(code, asked)
    assert any(isinstance(out, Opened) for out in outcomes)
    assert isinstance(outcomes[-1], Ended)
    assert items(outcomes, asked) == [0, 1, 2, 3, 4]


async def test_a_deadline_holds_until_the_first_item_is_there(code: UserCode) -> None:
    asked = exchange(cloudpickle.dumps(((), {})), CallHead("deadlines", stream=True))
    token = request_context.set(RequestContext(deadline=60.0))
    try:
        outcomes = await said(code, asked)
    finally:
        request_context.reset(token)
    assert items(outcomes, asked) == [60.0, None, None]


async def test_an_empty_stream_is_a_whole_answer(code: UserCode) -> None:
    outcomes = await call(code, "numbers", 0, stream=True)
    assert isinstance(outcomes[0], WholeResponseEvent)
    assert outcomes[0].body == b""


async def test_a_stream_that_breaks_gives_its_items_and_then_the_exception(code: UserCode) -> None:
    asked = exchange(cloudpickle.dumps(((), {})), CallHead("broken", stream=True))
    outcomes = await said(code, asked)
    _, raised = failure(outcomes)
    assert str(pickle.loads(raised.pickled)) == "after one"
    assert items(outcomes, asked) == [1]


@pytest.mark.parametrize(
    ("method", "stream", "said_so"),
    [("numbers", False, "stream=True"), ("plain", True, "did not return a generator")],
)
async def test_asking_for_the_wrong_kind_of_answer_is_told(
    code: UserCode, method: str, stream: bool, said_so: str
) -> None:
    failed, _ = failure(await call(code, method, 1, stream=stream))
    assert said_so in failed.message


async def test_a_stream_waits_while_the_network_is_slower_and_ends_when_nobody_wants_more(
    code: UserCode,
) -> None:
    asked = exchange(cloudpickle.dumps(((), {})), CallHead("forever", stream=True))
    saying = asyncio.get_running_loop().create_task(said(code, asked))
    await eventually(lambda: sum(map(len, asked.pieces or ())) > 1_000_000)
    await asyncio.sleep(0.05)
    saying.cancel()
    with pytest.raises(asyncio.CancelledError):
        await saying
    assert sum(map(len, asked.pieces or ())) < 2_000_000


async def test_msgpack_takes_the_place_of_pickle_for_foreign_callers(code: UserCode) -> None:
    head = CallHead("", is_pickled=False)
    body = msgspec.msgpack.encode([[1, {"a": b"x"}], {"k": None}])
    (answered,) = await said(code, exchange(body, head))
    assert isinstance(answered, WholeResponseEvent)
    assert msgspec.msgpack.decode(answered.body) == [[1, {"a": b"x"}], {"k": None}]


@pytest.mark.parametrize("body", [b"", b"\xc1", msgspec.msgpack.encode([1, 2]), cloudpickle.dumps(((), {}))])
async def test_a_body_that_is_not_such_msgpack_is_refused_and_never_unpickled(
    code: UserCode, body: bytes
) -> None:
    (failed,) = await said(code, exchange(body, CallHead(is_pickled=False)))
    assert isinstance(failed, Failed)
    assert failed.error_code == BadField.error_code


async def test_a_foreign_caller_gets_no_pickled_exception(code: UserCode) -> None:
    body = msgspec.msgpack.encode([["x"], {}])
    failed, raised = failure(await said(code, exchange(body, CallHead("fail", is_pickled=False))))
    assert failed.message.startswith("TypeError")
    assert raised.pickled == b""


async def test_an_answer_above_the_limit_is_refused(code: UserCode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(python_calls, "RESULT_BYTES_MAX", 1000)
    failed, _ = failure(await call(code, "", bytes(2000)))
    assert "at most 1000 can be sent" in failed.message


async def test_cancelling_reaches_the_users_code(code: UserCode) -> None:
    ended: list[str] = []
    begun = asyncio.Event()

    async def hold() -> None:
        begun.set()
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("hold")

    calling = asyncio.get_running_loop().create_task(call(UserCode(hold, hold, 1), ""))
    await begun.wait()
    calling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await calling
    assert ended == ["hold"]


@pytest.mark.parametrize("is_async", [True, False])
async def test_a_destructor_runs_once_when_the_replica_stops_whoever_still_refers_to_the_object(
    *, is_async: bool
) -> None:
    closed: list[str] = []

    class Closes:
        def __del__(self) -> None:
            closed.append("once")

    class ClosesLater:
        async def __del__(self) -> None:
            await asyncio.sleep(0)
            closed.append("once")

    servable = ClosesLater() if is_async else Closes()
    code = UserCode(servable, None, 1)

    await code.stop()
    assert closed == ["once"]
    code.discard()
    del servable
    assert closed == ["once"]


async def test_a_call_gets_its_arguments_as_they_are() -> None:
    def takes_none() -> str:
        return "ok"

    code = UserCode(takes_none, takes_none, 1)
    assert await code.call() == "ok"
    with pytest.raises(TypeError, match=r"\(\) takes 0 positional arguments but 1 was given"):
        await code.call(1)


async def test_the_error_of_a_missing_method_lists_those_that_are_there() -> None:
    class Model:
        def exists(self) -> None: ...

        def _private(self) -> None: ...

    with pytest.raises(
        BadField,
        match=r"Tried to call a method 'gone' that does not exist\. Available methods: \['exists'\] of Model",
    ):
        UserCode(Model(), None, 1).method("gone")
    assert (
        UserCode(Model(), None, 1).method("_private").function.__name__ == "_private"
    )  # Ray Serve calls these too


def test_a_missing_package_says_how_the_replica_gets_it() -> None:
    with pytest.raises(ModuleNotFoundError) as raised:
        importlib.import_module("no_such_package.part")
    raised.value.add_note(missing_package_hint(raised.value))
    assert '{"pip": ["no_such_package"]}' in user_traceback(raised.value)
