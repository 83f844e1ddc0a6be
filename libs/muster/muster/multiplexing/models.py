"""The models of one instance: loaded once for all callers, retained while they fit; and the decorator `multiplexed`."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import inspect
import weakref
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, TypeVar, cast, final, overload

import structlog

from muster.context import base_context
from muster.multiplexing.model_cache import UNLIMITED, ModelCache
from muster.per_instance import PerInstance, is_method
from serve_common.runtime.request_context import RequestContext, current_replica, request_context
from serve_common.runtime.tasks import OwnedTask, TaskOwner, cancellations
from serve_common.telemetry.catalogue.replicas import MODEL_EVICTIONS, MODEL_LOAD_SECONDS, MODEL_LOADS, MODELS
from serve_common.telemetry.metrics import process_metrics

_log = structlog.get_logger(__name__)

CLOSE_TIMEOUT_S: Final = 30.0


async def close_model(model_id: str, holder: list[Any]) -> None:
    """Close the only model in ``holder`` and let go of it; ``holder`` is empty afterwards.

    An ``aclose()`` or an async ``__del__`` is awaited; a plain ``__del__`` is called by Python itself, once, in a
    thread. What they raise is logged: no caller waits for it.

    Why it is not enough to drop the reference: the memory must be free before the next model is loaded. A model may
    have connections or processes to end, its ``__del__`` may take long and must not block the event loop, and one that
    is part of a reference cycle stays until the garbage collector runs.
    """
    try:
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            await _close(holder[0])
    except BaseException as error:
        if isinstance(error, asyncio.CancelledError) and cancellations():
            raise
        _log.exception("model_not_closed", model_id=model_id, error=repr(error))
    if await asyncio.to_thread(_release, holder):
        _log.info("model_still_referenced", model_id=model_id)


async def _close(model: Any) -> None:
    kind = type(model)
    if inspect.iscoroutinefunction(getattr(kind, "aclose", None)):
        await model.aclose()
    if inspect.iscoroutinefunction(getattr(kind, "__del__", None)):
        try:
            await model.__del__()
        finally:
            # Python will call it too, which would only create a coroutine that is never awaited.
            with contextlib.suppress(TypeError):
                quiet = {"__slots__": (), "__del__": lambda _: None, "__module__": kind.__module__}
                model.__class__ = type(kind.__name__, (kind,), quiet)


def _release(holder: list[Any]) -> bool:
    """Drop the reference; True when the model is still referenced elsewhere."""
    try:
        reference = weakref.ref(holder[0])
    except TypeError:
        holder.clear()
        return False
    holder.clear()
    if reference() is not None:
        gc.collect()
    return reference() is not None


SLOT_WAIT_S: Final = 10.0
"""Seconds that a load waits for an idle model to evict."""

Load = Callable[[], Awaitable[Any]]

_LOADED: Final = process_metrics.level(MODELS)
_LOADS: Final = process_metrics.total(MODEL_LOADS)
_LOAD_SECONDS: Final = process_metrics.distribution(MODEL_LOAD_SECONDS)
_EVICTIONS: Final = process_metrics.total(MODEL_EVICTIONS)
_OK: Final = ("ok",)
_ERROR: Final = ("error",)


@final
class _Model:
    """One model, from its first request until it is closed."""

    __slots__ = ("has_started", "holder", "is_evicted", "is_loaded", "load", "model_id", "users", "waiting")

    def __init__(self, model_id: str) -> None:
        self.model_id = model_id
        self.holder: list[Any] = []
        """The user's object as the only element, once it is loaded."""
        self.is_loaded = False
        self.is_evicted = False
        self.users: set[asyncio.Task[Any]] = set()
        self.waiting: dict[asyncio.Future[None], asyncio.Task[Any] | None] = {}
        self.load: OwnedTask | None = None
        self.has_started = False


@final
class Models:
    """The models of one instance. All methods run on the event loop that it was created on.

    A model is in use until the tasks that got it have ended, and is not closed before. So a model that is needed keeps
    its place, and a load that needs a place waits for an idle model. Two rules prevent a deadlock: a task that itself
    waits for a model does not keep others in use, and after `SLOT_WAIT_S` the least recently used model is evicted
    although it is in use. It is closed when its users are done; until then there is one model more in memory than
    allowed.

    A load goes on when its callers are gone: otherwise a model that takes longer to load than callers wait would never
    be loaded.
    """

    def __init__(self, name: str, places: int) -> None:
        self.loop = asyncio.get_running_loop()
        self._cache: ModelCache[_Model] = ModelCache(places)
        self._pending: dict[str, _Model] = {}
        """Models that wait for a place."""
        self._waiting_tasks: set[asyncio.Task[Any]] = set()
        """Tasks that wait for a model, and so use no other one meanwhile."""
        self._waiting_for_slot: list[asyncio.Future[None]] = []
        self._num_loaded = 0
        self._tasks = TaskOwner(f"models.{name}")
        self._base_context = base_context.copy()
        _all.add(self)

    def ids(self) -> list[str]:
        """Ids of the models that are held or being loaded."""
        return [*self._cache, *self._pending]

    @property
    def num_loaded(self) -> int:
        """Number of loaded models, evicted ones that still have users included."""
        return self._num_loaded

    async def get(self, model_id: str, load: Load) -> Any:
        """Return the model, loading it with ``load`` if needed. Raises what ``load`` raises."""
        model = self._cache.use(model_id) or self._pending.get(model_id)
        if model is None:
            model = self._pending[model_id] = _Model(model_id)
            model.load = self._base_context.run(self._start, self._load(model, load), model_id)
            publish_models()
        self._note_user(model)
        if not model.is_loaded:
            await self._wait_for(model)
        return model.holder[0]

    def _start(self, coro: Any, name: str) -> OwnedTask:
        return self._tasks.start(coro, name)

    # -- callers --

    def _note_user(self, model: _Model) -> None:
        task = asyncio.current_task()
        if task is None or task in model.users:
            return
        model.users.add(task)

        def on_done(task: asyncio.Task[Any]) -> None:
            model.users.discard(task)
            if model.users:
                return
            if model.is_evicted:
                self._base_context.run(self._start, self._close(model), model.model_id)
            else:
                self._notify_slot_waiters()

        task.add_done_callback(on_done)

    async def _wait_for(self, model: _Model) -> None:
        task = asyncio.current_task()
        loaded: asyncio.Future[None] = self.loop.create_future()
        model.waiting[loaded] = task
        if task is not None:
            self._waiting_tasks.add(task)
            self._notify_slot_waiters()  # models that this task used may be evicted now
        try:
            await loaded
        finally:
            if task is not None:
                self._waiting_tasks.discard(task)
            model.waiting.pop(loaded, None)
            if loaded.done() and not loaded.cancelled():
                loaded.exception()  # retrieved, as it may have been set at the moment this task was cancelled
            if not model.waiting and self._pending.get(model.model_id) is model:
                # No caller is left, and it has no place yet.
                del self._pending[model.model_id]
                if model.has_started and model.load is not None:
                    model.load.cancel()
                publish_models()

    def _notify(self, model: _Model, error: BaseException | None) -> None:
        """Wake all callers that wait for ``model``, with ``error`` if loading failed."""
        for loaded, task in model.waiting.items():
            if task is not None:
                self._waiting_tasks.discard(task)
            if not loaded.done():
                if error is None:
                    loaded.set_result(None)
                else:
                    loaded.set_exception(error)

    # -- loading --

    async def _load(self, model: _Model, load: Load) -> None:
        model.has_started = True
        model_id = model.model_id
        if self._pending.get(model_id) is not model:
            return  # the callers were gone before this started
        request_context.set(RequestContext(model_id=model_id))
        failure: BaseException | None = None
        started_at: float | None = None
        try:
            await self._take_slot(model)
            started_at = self.loop.time()
            model.holder.append(await load())
            model.is_loaded = True
            self._num_loaded += 1
        except BaseException as error:  # noqa: BLE001 - even SystemExit is for the callers, not for the event loop
            failure = error
            if self._pending.get(model_id) is model:
                del self._pending[model_id]
            elif self._cache.use(model_id) is model:
                self._cache.remove(model_id)
            if isinstance(error, asyncio.CancelledError | StopIteration):
                failure = RuntimeError(f"loading model {model_id!r} ended with {type(error).__name__}")
                failure.__cause__ = error
            if not model.waiting and not isinstance(error, asyncio.CancelledError):
                _log.error("model_not_loaded", model_id=model_id, exc_info=error)
        if started_at is not None:
            _LOADS.add(1.0, _OK if failure is None else _ERROR)
            _LOAD_SECONDS.observe(self.loop.time() - started_at)
        self._notify(model, failure)
        failure = None  # its traceback holds this frame
        self._notify_slot_waiters()
        publish_models()

    async def _take_slot(self, model: _Model) -> None:
        """Give ``model`` a place in the cache; another one may have to be evicted first."""
        evicted: _Model | None = None
        wait_until = self.loop.time() + SLOT_WAIT_S
        while not self._cache.has_free_slot:
            evicted = self._evict(self._is_idle)
            if evicted is None and self.loop.time() >= wait_until:
                evicted = self._evict(lambda other: other.is_loaded)
                if evicted is not None:
                    _log.warning(
                        "model_evicted_in_use", model_id=evicted.model_id, for_model_id=model.model_id
                    )
            if evicted is None:
                await self._wait_for_change(wait_until)
        self._cache.put(model.model_id, model)
        del self._pending[model.model_id]
        publish_models()
        if evicted is not None and not evicted.users:
            await self._close(evicted)

    def _is_idle(self, model: _Model) -> bool:
        return model.is_loaded and model.users <= self._waiting_tasks

    def _evict(self, may_go: Callable[[_Model], bool]) -> _Model | None:
        model_id = self._cache.choose_victim(may_go)
        if model_id is None:
            return None
        model = self._cache.remove(model_id)
        assert model is not None
        model.is_evicted = True
        _EVICTIONS.add(1.0)
        return model

    async def _wait_for_change(self, wait_until: float) -> None:
        change: asyncio.Future[None] = self.loop.create_future()
        self._waiting_for_slot.append(change)
        # All may still be loading, for an unknown time; then checking again gains nothing.
        try:
            async with asyncio.timeout_at(wait_until if self.loop.time() < wait_until else None):
                await change
        except TimeoutError:
            pass
        finally:
            self._waiting_for_slot.remove(change)

    def _notify_slot_waiters(self) -> None:
        for change in self._waiting_for_slot:
            if not change.done():
                change.set_result(None)

    async def _close(self, model: _Model) -> None:
        try:
            await close_model(model.model_id, model.holder)
        finally:
            self._num_loaded -= 1
            _update_loaded_gauge()


_all: weakref.WeakSet[Models] = weakref.WeakSet()


def _update_loaded_gauge() -> None:
    _LOADED.set(sum(models.num_loaded for models in _all))


def publish_models() -> None:
    """Publish to routers which models this replica holds, in all instances; does nothing outside of replicas."""
    _update_loaded_gauge()
    replica = current_replica()
    if replica is not None and replica.publish_models is not None:
        replica.publish_models(sorted({model_id for models in _all for model_id in models.ids()}))


MODEL_ID_LENGTH_MAX = 256

F = TypeVar("F", bound=Callable[..., Coroutine[Any, Any, Any]])


@overload
def multiplexed(func: F, max_num_models_per_replica: int = 3) -> F: ...
@overload
def multiplexed(func: None = None, max_num_models_per_replica: int = 3) -> Callable[[F], F]: ...
def multiplexed(func: F | None = None, max_num_models_per_replica: int = 3) -> F | Callable[[F], F]:
    """Cache the models that an ``async def`` loads by id, at most ``max_num_models_per_replica`` per instance::

        class Translator:
            @serve.multiplexed(max_num_models_per_replica=4)
            async def get_model(self, model_id: str) -> Model:
                return await load(f"/models/{model_id}")

            async def __call__(self, request: Request) -> str:
                model = await self.get_model(serve.get_multiplexed_model_id())
                return model.translate(await request.text())

    Callers name the model in the header ``serve_multiplexed_model_id``; routers prefer replicas that hold it.

    - A model is loaded once, however many callers request it at the same time. A failed load raises in all of them,
      and the next caller tries again. A load that has started goes on when its callers are gone.
    - When the cache is full, the least recently used idle model is evicted first. A model is in use until the task
      (the request) that got it has ended. When all are in use, the load waits for an idle one; after 10 s the least
      recently used one is evicted all the same, and closed when its users are done.
    - Before the next model is loaded, the evicted one is closed: its ``aclose()`` or async ``__del__`` is awaited,
      and its plain ``__del__`` runs, in a thread, unless something else still references it.
    - -1 means no limit.

    Raises TypeError unless it decorates an async function of one model id, ValueError for other numbers below 1.
    """
    if isinstance(max_num_models_per_replica, bool) or not isinstance(max_num_models_per_replica, int):
        raise TypeError("max_num_models_per_replica must be an integer.")
    if max_num_models_per_replica < 1 and max_num_models_per_replica != UNLIMITED:
        raise ValueError("max_num_models_per_replica must be positive. -1 means no limit.")
    if func is None:
        return functools.partial(_decorate, places=max_num_models_per_replica)
    return _decorate(func, max_num_models_per_replica)


def _decorate(func: F, places: int) -> F:
    if not callable(func):
        raise TypeError("The `multiplexed` decorator must be used with a function or method.")
    if not inspect.iscoroutinefunction(func):
        raise TypeError("@serve.multiplexed can only be used to decorate async functions or methods.")
    parameters = list(inspect.signature(func).parameters.values())
    has_instance = is_method(func, parameters)
    if len(parameters) != 1 + has_instance:
        raise TypeError(
            "@serve.multiplexed can only be used to decorate functions or methods with at least one 'model_id: str' "
            f"argument, and no others: {func.__qualname__}{inspect.signature(func)}"
        )
    signature = inspect.Signature(parameters)
    id_name = parameters[-1].name
    instances: PerInstance[Models] = PerInstance(functools.partial(Models, func.__name__, places))

    @functools.wraps(func)
    async def get_model(*args: Any, **kwargs: Any) -> Any:
        try:
            bound = signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise TypeError(f"{func.__qualname__}() {error}") from None
        model_id = bound[id_name]
        _check(model_id)
        instance = bound[parameters[0].name] if has_instance else None
        load = functools.partial(func, *bound.values())
        return await instances.of(instance).get(model_id, load)

    return cast("F", get_model)


def _check(model_id: Any) -> None:
    if not isinstance(model_id, str):
        raise TypeError("The model ID must be a string.")
    if not model_id:
        raise ValueError("The model ID cannot be empty. The request names none.")
    if len(model_id) > MODEL_ID_LENGTH_MAX:
        raise ValueError(
            f"the model id has {len(model_id)} characters; at most {MODEL_ID_LENGTH_MAX} are allowed"
        )
