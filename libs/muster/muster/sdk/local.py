"""Local testing mode: deployments run within this process, one replica each, and need no stack.

Arguments, results and exceptions are pickled on their way as between processes, so what could not travel fails here
too. There is no HTTP: deployments are called by their handles.
"""

from __future__ import annotations

import asyncio
import inspect
import pickle
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any, Final, final

import cloudpickle  # type: ignore[import-untyped]  # it ships no hints

from muster.handles.calls import CallOutcome, HandleCall
from muster.handles.handle import DeploymentHandle
from muster.handles.options import RequestCancelledError
from muster.handles.pickles import to_replica_error
from muster.sdk.build import build_local
from muster.sdk.deployments import Application, Deployment
from serve_common.errors import BadField, DeadlineExceeded, ServeError
from serve_common.runtime.request_context import RequestContext, request_context
from serve_common.runtime.tasks import OwnedTask, TaskOwner
from serve_common.runtime.threads import LoopThread

_LENGTH_BYTES: Final = 4
_END: Final = object()


@final
class LocalReplica:
    """The one replica of a deployment in local testing mode: an event loop of its own for its code."""

    def __init__(self, deployment: Deployment) -> None:
        """Constructs the user's object, and reconfigures it if there is a user_config; raises what they raise."""
        self._name = deployment.name
        self._thread = LoopThread(f"local {deployment.name}")
        self._tasks = TaskOwner(f"local {deployment.name}")
        self._running: dict[HandleCall, OwnedTask] = {}
        self._target = self._thread.submit(_construct(deployment)).result()

    def post(self, call: HandleCall) -> None:
        """Do the next step for ``call``; callable from any thread, as that of a router."""
        self._thread.loop.call_soon_threadsafe(self._process, call)

    def _process(self, call: HandleCall) -> None:
        if call.outcome is not None:
            return
        running = self._running.get(call)
        if call.is_cancelled:
            if running is not None:
                running.cancel()
            call.fail(RequestCancelledError(call.request_id))
        elif running is None and self._has_sources(call):
            self._running[call] = self._tasks.start(self._run(call), f"call {call.request_id}")

    def _has_sources(self, call: HandleCall) -> bool:
        for source in () if call.sources is None else call.sources.awaited():
            if source.outcome is None:
                return False  # it posts this call again
            if source.outcome.failure is not None:
                call.finish(source.outcome)
                return False
        if call.sources is not None:
            call.body, call.sources = call.sources.joined(), None
        return True

    async def _run(self, call: HandleCall) -> None:
        context = RequestContext(
            request_id=call.request_id, deadline=call.deadline, model_id=call.head.model_id
        )
        request_context.set(context)
        try:
            async with asyncio.timeout(max(0.0, call.deadline - time.monotonic())):
                await self._respond(call)
        except TimeoutError:
            call.fail(DeadlineExceeded(f"{self._name} did not answer in time"))
        except ServeError as error:
            call.fail(error)
        finally:
            self._running.pop(call, None)

    async def _respond(self, call: HandleCall) -> None:
        args, kwargs = pickle.loads(call.body)  # noqa: S301 - our own bytes
        method = self._method(call.head.method_name)
        try:
            if call.items is None:
                result = await _call(method, args, kwargs)
                call.finish(CallOutcome(body=cloudpickle.dumps(_whole(result, call))))
                return
            async with aclosing(_items(call.head.method_name, method, args, kwargs)) as items:
                async for item in items:
                    data = cloudpickle.dumps(item)
                    call.items.put(memoryview(len(data).to_bytes(_LENGTH_BYTES, "big") + data))
            call.finish(CallOutcome())
        except Exception as error:
            if isinstance(error, TimeoutError) and time.monotonic() >= call.deadline:
                raise
            raise to_replica_error(error) from error

    def _method(self, name: str) -> Any:
        if not name or name == "__call__":
            if not callable(self._target):
                raise BadField("method_name", f"{self._name} has no __call__")
            return self._target
        method = None if name.startswith("__") else getattr(self._target, name, None)
        if not callable(method):
            names = [known for known in dir(self._target) if not known.startswith("__")]
            raise BadField(
                "method_name",
                f"Tried to call a method {name!r} that does not exist. Available methods: {names} of {self._name}",
            )
        return method


async def _construct(deployment: Deployment) -> Any:
    target: Any = deployment.func_or_class
    if inspect.isclass(target):
        target = await construct(target, deployment.init_args, deployment.init_kwargs)
    user_config = deployment.user_config
    if user_config is not None:
        reconfigured = target.reconfigure(user_config)
        if inspect.isawaitable(reconfigured):
            await reconfigured
    return target


async def construct(kind: type[Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An instance of ``kind``, whose constructor may be async, as in Ray Serve."""
    if not inspect.iscoroutinefunction(kind.__init__):
        return kind(*args, **kwargs)
    instance = kind.__new__(kind, *args, **kwargs)
    await kind.__init__(instance, *args, **kwargs)
    return instance


async def _call(method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    called = method if inspect.isroutine(method) else method.__call__
    if inspect.iscoroutinefunction(called) or inspect.isasyncgenfunction(inspect.unwrap(called)):
        result = method(*args, **kwargs)
    else:
        result = await asyncio.to_thread(method, *args, **kwargs)
    return await result if inspect.isawaitable(result) else result


def _whole(result: Any, call: HandleCall) -> Any:
    if inspect.isgenerator(result) or inspect.isasyncgen(result):
        name = call.head.method_name or "__call__"
        raise TypeError(
            f"Method '{name}' returned a generator. You must use `handle.options(stream=True)` to call generators on a "
            "deployment."
        )
    return result


async def _items(
    name: str, method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> AsyncGenerator[Any, None]:
    result = await _call(method, args, kwargs)
    if inspect.isasyncgen(result):
        async with aclosing(result) as items:
            async for item in items:
                yield item
    elif isinstance(result, Iterator):
        while (item := await asyncio.to_thread(next, result, _END)) is not _END:
            yield item
    else:
        raise TypeError(
            f"Called method '{name or '__call__'}' with `handle.options(stream=True)` but it did not return a "
            f"generator: it returned a {type(result).__name__}."
        )


def run_locally(app: Application, name: str) -> DeploymentHandle:
    """Construct all deployments of ``app`` in this process; returns the ingress's handle. Raises what they raise."""

    def make_handle(deployment: Deployment, app_name: str) -> DeploymentHandle:
        return DeploymentHandle(deployment.name, app_name, post=LocalReplica(deployment).post)

    return build_local(app, name=name, make_handle=make_handle)
