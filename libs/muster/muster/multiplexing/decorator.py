"""The decorator `multiplexed`, with the names and defaults of Ray Serve's."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar, cast, overload

from muster.multiplexing.models import Models
from muster.multiplexing.shelf import UNLIMITED
from muster.per_instance import PerInstance, is_method

MODEL_ID_LENGTH_MAX = 256

F = TypeVar("F", bound=Callable[..., Coroutine[Any, Any, Any]])


@overload
def multiplexed(func: F, max_num_models_per_replica: int = 3) -> F: ...
@overload
def multiplexed(func: None = None, max_num_models_per_replica: int = 3) -> Callable[[F], F]: ...
def multiplexed(func: F | None = None, max_num_models_per_replica: int = 3) -> F | Callable[[F], F]:
    """Keep what an ``async def`` loads for a model id, at most ``max_num_models_per_replica`` per instance::

        class Translator:
            @serve.multiplexed(max_num_models_per_replica=4)
            async def get_model(self, model_id: str) -> Model:
                return await load(f"/models/{model_id}")

            async def __call__(self, request: Request) -> str:
                model = await self.get_model(serve.get_multiplexed_model_id())
                return model.translate(await request.text())

    Callers name the model in the header ``serve_multiplexed_model_id``; routers prefer replicas that hold it.

    - A model is loaded once, however many ask for it at the same time. A load that fails fails for all of them with
      what it raised, and the next one who asks tries again. It goes on when those who asked are gone.
    - When there is no room, the least recently used model that nobody uses goes first. It is in use until the task
      (the request) that asked for it has ended. When all are in use, the load waits for one that is not; after 10 s
      the least recently used goes all the same, and is closed when its users are done.
    - Before the next model is loaded, the one that went is closed: its ``aclose()`` or async ``__del__`` is awaited,
      and its plain ``__del__`` runs, in a thread, unless something else still refers to it.
    - -1 is no limit.

    Raises TypeError for what is no async function of one model id, ValueError for another number below 1.
    """
    if isinstance(max_num_models_per_replica, bool) or not isinstance(max_num_models_per_replica, int):
        raise TypeError(
            f"max_num_models_per_replica must be a whole number, not {max_num_models_per_replica!r}"
        )
    if max_num_models_per_replica < 1 and max_num_models_per_replica != UNLIMITED:
        raise ValueError(
            f"max_num_models_per_replica must be at least 1, or -1 for no limit, not {max_num_models_per_replica}"
        )
    if func is None:
        return functools.partial(_decorate, places=max_num_models_per_replica)
    return _decorate(func, max_num_models_per_replica)


def _decorate(func: F, places: int) -> F:
    if not inspect.iscoroutinefunction(func):
        raise TypeError(f"@multiplexed needs an async def function, and {func!r} is none")
    parameters = list(inspect.signature(func).parameters.values())
    has_instance = is_method(func, parameters)
    if len(parameters) != 1 + has_instance:
        raise TypeError(f"{func.__qualname__} must take one argument, the model id")
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
        raise TypeError(f"a model id is a text, not {model_id!r}")
    if not model_id:
        raise ValueError("the model id is empty; the request names none")
    if len(model_id) > MODEL_ID_LENGTH_MAX:
        raise ValueError(
            f"the model id has {len(model_id)} characters; at most {MODEL_ID_LENGTH_MAX} are allowed"
        )
