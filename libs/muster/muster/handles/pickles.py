"""Pickling of values and exceptions between this process and a replica.

Why cloudpickle: it supports functions and classes of a script or notebook, which the replica cannot import. Plain
scalars use pickle, which is several times faster.
"""

from __future__ import annotations

import functools
import pickle
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, Final, final

import cloudpickle  # type: ignore[import-untyped]  # it ships no hints
import msgspec

from muster.handles.options import ArgumentsTooLarge, NoSuchMethod, RequestCancelledError
from serve_common.dispatch.errors import ReplicaError, ResponseUnusable
from serve_common.errors import (
    BadField,
    DeadlineExceeded,
    LimitReached,
    NoReplicaAvailable,
    NotFound,
    ReplicaDied,
    RequestFailed,
    ServeError,
    UserCodeRaised,
)
from serve_common.protocol.frames import Raised
from serve_common.runtime.ray_references import let_references_travel
from serve_common.runtime.request_context import current_replica

BODY_BYTES_MAX: Final = 256 * 1024 * 1024
"""Largest size of all arguments of one call, and of one returned value; replicas have the same limit."""

_SCALARS: Final = frozenset({str, bytes, int, float, bool, type(None)})
_REMOTE: Final = "Remote traceback:\n"
_NAMED: Final = {
    kind.error_code: kind
    for kind in (DeadlineExceeded, LimitReached, NoReplicaAvailable, NotFound, UserCodeRaised)
}
_raised_decoder: Final = msgspec.msgpack.Decoder(Raised)


@final
class Sent:
    """An already pickled value; it is unpickled together with the value that contains it."""

    __slots__ = ("_data",)

    def __init__(self, data: bytes) -> None:
        self._data = data

    def __reduce__(self) -> tuple[Any, tuple[bytes]]:
        return pickle.loads, (self._data,)


def pickle_arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    """Build the body of a call. Raises `LimitReached`, TypeError for an unpicklable value, and what pickling raises."""
    if all(type(value) in _SCALARS for value in args) and all(
        type(value) in _SCALARS for value in kwargs.values()
    ):
        body = pickle.dumps((tuple(args), kwargs), pickle.HIGHEST_PROTOCOL)
    else:
        let_references_travel()
        body = cloudpickle.dumps((tuple(args), dict(kwargs)))
    return _check_size(body)


def pickle_one(value: Any) -> Sent:
    """Pickle one argument, to be joined with others later; raises as `pickle_arguments` does."""
    return Sent(pickle_value(value))


def pickle_value(value: Any) -> bytes:
    """Pickle one value; raises as `pickle_arguments` does."""
    let_references_travel()
    return _check_size(cloudpickle.dumps(value))


def join_arguments(args: Sequence[Sent], kwargs: Mapping[str, Sent]) -> bytes:
    """Build the body of a call from pickled arguments. Raises `LimitReached`."""
    return _check_size(pickle.dumps((tuple(args), dict(kwargs)), pickle.HIGHEST_PROTOCOL))


def _check_size(body: bytes) -> bytes:
    if len(body) > BODY_BYTES_MAX:
        raise ArgumentsTooLarge(
            f"the arguments have {len(body)} bytes; a call takes at most {BODY_BYTES_MAX}"
        )
    return body


def unpickle(data: bytes | memoryview) -> Any:
    """Unpickle a value that a replica sent. Raises `ResponseUnusable`."""
    try:
        return pickle.loads(data)  # noqa: S301 - replicas of this instance are trusted
    except Exception as error:  # unpickling runs any code
        raise ResponseUnusable(
            f"the answer cannot be unpickled here: {type(error).__name__}: {error}"
        ) from error


def to_exception(error: ServeError) -> Exception:
    """The exception for the caller: the deployment's own if it could be pickled, with its remote traceback as a note.

    Sets `ServeError.is_of_call` unless the deployment's code raised it or the caller cancelled the call.
    """
    if isinstance(error, ReplicaError):
        exception = _from_replica_error(error)
        is_own = error.code == UserCodeRaised.error_code
    else:
        exception = _as_rays_error(error) if type(error) in _RAY_NAMESAKES and _has_rays_errors() else error
        is_own = isinstance(error, RequestCancelledError)
    if isinstance(exception, ServeError):
        exception.is_of_call = not is_own
    return exception


@final
class _RaisedHere(ReplicaError):
    """What code of this very process raised."""


def to_replica_error(error: BaseException, raised: BaseException | None = None) -> ReplicaError:
    """An error that the user's code raised in this process, as it would arrive from another.

    ``raised`` is what the caller gets, if not ``error``, whose traceback it has.
    """
    raised = error if raised is None else raised
    try:
        pickled = cloudpickle.dumps(raised)
        pickle.loads(pickled)  # noqa: S301 - our own bytes
    except Exception:  # noqa: BLE001 - the exception's own code; its text still travels
        pickled = b""
    body = msgspec.msgpack.encode(Raised(pickled, "".join(traceback.format_exception(error))))
    line = f"{type(raised).__name__}: {raised}"
    return _RaisedHere(UserCodeRaised.error_code, UserCodeRaised.status_hint, line, body)


def _from_replica_error(error: ReplicaError) -> Exception:
    raised = _read_raised(error.raised)
    restored = None if raised is None else _restore(raised.pickled)
    exception = _from_code(error) if restored is None else restored
    if raised is not None and raised.traceback:
        # The newest one contains those before it.
        notes = [note for note in getattr(exception, "__notes__", ()) if not note.startswith(_REMOTE)]
        if restored is not None and not isinstance(error, _RaisedHere) and _has_rays_errors():
            exception = _as_task_error(restored, raised.traceback)
        exception.__notes__ = [*notes, _REMOTE + raised.traceback]
    return exception


def _has_rays_errors() -> bool:
    """Whether what calls raise here is an error of Ray's too, as in Ray Serve: where a program imports Ray.

    Every replica imports Ray, so there it is for those whose code came with a program of Ray Serve's form.
    """
    replica = current_replica()
    return "ray.exceptions" in sys.modules and (replica is None or replica.is_program)


_RAY_NAMESAKES: Final[dict[type[ServeError], str]] = {
    ReplicaDied: "ActorDiedError",
    RequestCancelledError: "TaskCancelledError",
}
"""Errors that are an error of Ray's too, in Ray Serve."""


def _as_rays_error(error: ServeError) -> ServeError:
    """The error as its namesake of `ray.exceptions` too, which a program that imports Ray may catch."""
    own: Any = type(error)
    combined = _combined_class(own, getattr(sys.modules["ray.exceptions"], _RAY_NAMESAKES[own]))
    exception = combined(*error.args)
    vars(exception).update(vars(error))
    return exception


@functools.cache
def _combined_class(own: Any, ray_error: Any) -> type[ServeError]:
    def construct(self: ServeError, *args: Any) -> None:
        ray_error.__init__(self)
        own.__init__(self, *args)
        self.args = args

    def reduce(self: ServeError) -> tuple[Any, ...]:
        return own, self.args  # another process may have no Ray

    members: dict[str, Any] = {"__init__": construct, "__reduce__": reduce, "__str__": own.__str__}
    return type(own.__name__, (own, ray_error), members)


def _as_task_error(exception: Exception, remote_traceback: str) -> Exception:
    """The exception as a `RayTaskError` too; unchanged where its class cannot be combined."""
    task_error_class: Any = sys.modules["ray.exceptions"].RayTaskError
    if task_error_class in type(exception).__mro__:
        return exception
    try:
        task_error = task_error_class(
            "handle_request", remote_traceback, exception, proctitle="muster", ip="127.0.0.1"
        )
        combined: Exception = task_error.make_dual_exception_instance()
        is_whole = task_error.cause is exception
    except Exception:  # noqa: BLE001 - the exception's own code; a plain one is right too
        return exception
    if is_whole:
        return combined
    return exception  # it cannot be pickled


def _read_raised(body: bytes) -> Raised | None:
    try:
        return _raised_decoder.decode(body) if body else None
    except msgspec.DecodeError:
        return None  # the error's code and message still describe it


def _restore(pickled: bytes) -> Exception | None:
    """Unpickle an exception; None when that fails, and for StopIteration and the like, which are no failures here."""
    if not pickled:
        return None
    try:
        exception = pickle.loads(pickled)  # noqa: S301 - as above
    except Exception:  # noqa: BLE001 - a class unknown here; message and traceback still describe it
        return None
    is_usable = isinstance(exception, Exception) and not isinstance(
        exception, StopIteration | StopAsyncIteration
    )
    return exception if is_usable else None


def _from_code(error: ReplicaError) -> Exception:
    message = str(error)
    if error.code == BadField.error_code:
        field, _, reason = message.partition(": ")
        return NoSuchMethod(field, reason) if field == "method_name" else BadField(field, reason)
    return _NAMED.get(error.code, RequestFailed)(message)
