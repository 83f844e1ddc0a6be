"""Calls from deployment handles: pickled arguments, and a pickled result or a stream of them.

Why not as HTTP responses: a caller in Python gets what the user's code returned or raised, not what HTTP would make of
it.

Security: unpickling runs code, so a client that may send such a call may run code here. NATS' permissions allow it to
replicas and holders of handles only.
"""

from __future__ import annotations

import inspect
import pickle
from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from typing import Any, Final

import cloudpickle  # type: ignore[import-untyped]  # it ships no hints
import msgspec
import structlog

from serve_common.errors import BadField, ServeError, UserCodeRaised
from serve_common.protocol.frames import FRAME_BODY_BYTES_MAX, CallHead, Raised
from serve_common.runtime.ray_references import let_references_travel
from serve_replica_host.replica.io.request import (
    Failed,
    IoEvent,
    ReplicaRequest,
    WholeResponseEvent,
    is_cancellation,
)
from serve_replica_host.replica.io.response_stream import ResponseStream
from serve_replica_host.replica.telemetry.traces import error_line, user_traceback
from serve_replica_host.replica.user.code import UserCode, on_response_started
from serve_replica_host.replica.user.executor import build_failure, is_reported_to_caller

LENGTH_BYTES: Final = 4
_CHARSET: Final = "utf-8"  # required by the writer, which gets only bytes here

Encode = Callable[[Any], bytes]


async def send_items(
    code: UserCode,
    result: Any,
    exchange: ReplicaRequest,
    io_queue: Callable[[IoEvent], object],
    encode: Encode,
) -> IoEvent:
    """Send all items of an async or plain generator; returns the outcome that ends the exchange.

    A plain one may block, so it runs in a thread. Raises what the generator or ``encode`` raises, TypeError if it is
    not a generator.

    Each item is sent after its length. Why not one frame for each: a token is a few bytes, and its frame would cost
    more than everything else; with lengths, many items are joined.
    """
    is_async = inspect.isasyncgen(result)
    if not is_async and not inspect.isgenerator(result):
        name = exchange.head.call.method_name if exchange.head.call is not None else ""
        raise TypeError(
            f"Called method '{name or '__call__'}' with `handle.options(stream=True)` but it did not return a "
            f"generator: it returned a {type(result).__name__}."
        )
    stream = ResponseStream(exchange, io_queue)
    # The head is sent with the first item: until then a failure is the complete response, and the deadline applies.
    stream.open(200, [], soon=False)
    if is_async:
        items = _items(result, encode)
        try:
            await stream.run(items, _CHARSET)
        finally:
            await items.aclose()
    else:
        await code.run_plain(stream.run_plain, _plain_items(result, encode), _CHARSET)
    stream.end()
    return stream.outcome()


async def _items(generator: AsyncGenerator[Any, None], encode: Encode) -> AsyncGenerator[bytes, None]:
    has_started = False
    try:
        async for item in generator:
            data = encode(item)
            yield len(data).to_bytes(LENGTH_BYTES, "big") + data
            if not has_started:
                has_started = True
                on_response_started()  # what the generator calls from here on has no deadline
    finally:
        await generator.aclose()


def _plain_items(generator: Generator[Any, None, None], encode: Encode) -> Iterator[bytes]:
    has_started = False
    try:
        for item in generator:
            data = encode(item)
            yield len(data).to_bytes(LENGTH_BYTES, "big") + data
            if not has_started:
                has_started = True
                on_response_started()
    finally:
        generator.close()


_log = structlog.get_logger(__name__)

RESULT_BYTES_MAX: Final = 256 * 1024 * 1024
"""Maximum size of one value; the same as for a request's body."""
_RAISED_BYTES_MAX: Final = FRAME_BODY_BYTES_MAX // 2
"""Maximum size of a pickled exception: with its traceback it must fit one frame."""
_PLAIN_CALL: Final = CallHead()
_RETAINED_ATTRIBUTES: Final = ("status", "retry_after_s")
"""Attributes kept of an error that is replaced by its base class."""
_SCALARS: Final = frozenset({str, bytes, int, float, bool, type(None)})
"""Types for which pickle suffices, which is several times faster than cloudpickle."""


class ResultUnfit(TypeError):
    """The value returned by the user's code cannot be sent to the handle; the message has the reason."""


async def handle_call(
    code: UserCode, exchange: ReplicaRequest, io_queue: Callable[[IoEvent], object]
) -> IoEvent:
    """Call the user's code for a request of kind PYTHON; returns the outcome that ends the exchange.

    Streams are sent through ``io_queue`` first. Raises only `asyncio.CancelledError`.
    """
    head = exchange.head.call or _PLAIN_CALL
    try:
        args, kwargs = _arguments(exchange.body, head)
    except BadField as error:
        return Failed(exchange, error.error_code, error.status_hint, str(error))
    try:
        result = await code.call(*args, method_name=head.method_name, **kwargs)
        if not head.stream:
            return WholeResponseEvent(exchange, 200, [], _encoded(result, head))
        return await send_items(code, result, exchange, io_queue, lambda item: _encode(item, head))
    except BadField as error:  # there is no such method
        return Failed(exchange, error.error_code, error.status_hint, str(error))
    except BaseException as error:
        if is_cancellation(exchange, error):
            raise
        return _raised(exchange, head, error)


def _arguments(body: bytes, head: CallHead) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Decode positional and named arguments. Raises `BadField`."""
    if not head.is_pickled:
        try:
            named: tuple[tuple[Any, ...], dict[str, Any]] = msgspec.msgpack.decode(
                body, type=tuple[tuple[Any, ...], dict[str, Any]]
            )
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise BadField("arguments", f"are not msgpack of [args, kwargs]: {error}") from error
        return named
    try:
        args, kwargs = pickle.loads(body)  # noqa: S301 - see the module's text
        return tuple(args), dict(kwargs)
    except Exception as error:  # unpickling runs any code
        raise BadField("arguments", f"cannot be unpickled in the replica: {error_line(error)}") from error


def _encoded(result: Any, head: CallHead) -> bytes:
    if inspect.isgenerator(result) or inspect.isasyncgen(result):
        if inspect.isgenerator(result):
            result.close()
        name = head.method_name or "__call__"
        raise TypeError(
            f"Method '{name}' returned a generator. You must use `handle.options(stream=True)` to call generators on a "
            "deployment."
        )
    return _encode(result, head)


def _encode(value: Any, head: CallHead) -> bytes:
    """Encode a result. Raises `ResultUnfit`."""
    try:
        if not head.is_pickled:
            data = _msgpack.encode(value)
        elif type(value) in _SCALARS:
            data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
        else:
            let_references_travel()
            data = cloudpickle.dumps(value)
    except Exception as error:  # pickling runs the value's own code
        how = "pickled" if head.is_pickled else "written as msgpack"
        raise ResultUnfit(
            f"the returned {type(value).__name__} cannot be {how}: {error_line(error)}"
        ) from error
    if len(data) > RESULT_BYTES_MAX:
        raise ResultUnfit(f"the returned value has {len(data)} bytes; at most {RESULT_BYTES_MAX} can be sent")
    return data


def _raised(exchange: ReplicaRequest, head: CallHead, error: BaseException) -> Failed:
    is_ours = isinstance(error, ResultUnfit)
    line = str(error) if is_ours else error_line(error)
    traceback_text = user_traceback(error)
    # What cannot be pickled is told as Python's own error, which says it of the value within.
    shown = error.__cause__ if is_ours else error
    pickled = _pickled(shown) if head.is_pickled and shown is not None else b""
    body = msgspec.msgpack.encode(Raised(pickled, traceback_text))
    if exchange.trace is not None:
        exchange.trace.code_raised(error, line)
    if isinstance(error, ServeError) and is_reported_to_caller(error):
        return build_failure(exchange, error, body)
    _log.error(
        "user_code_raised",
        request_id=exchange.head.request_id,
        method=head.method_name,
        error=line,
        traceback=traceback_text,
    )
    return Failed(exchange, UserCodeRaised.error_code, UserCodeRaised.status_hint, line, body)


def _pickled(error: BaseException) -> bytes:
    """Pickle an exception; empty when it cannot be restored: many can be pickled but not unpickled."""
    # What a call of a handle raised may be Ray's error too (`muster.handles.pickles`), which callers without Ray cannot
    # have; those with it make it anew.
    cause = getattr(error, "cause", None)
    if isinstance(cause, Exception) and type(error).__name__.startswith("RayTaskError("):
        error = cause
    try:
        data: bytes = cloudpickle.dumps(error)
        restored = pickle.loads(data)  # noqa: S301 - our own bytes
    except BaseException as failure:  # noqa: BLE001 - the exception's own code; its text still travels
        if isinstance(error, ServeError):
            return pickle.dumps(_as_base_error(error))
        _log.warning("exception_not_pickled", exception=type(error).__name__, reason=error_line(failure))
        return b""
    return data if isinstance(restored, type(error)) and len(data) <= _RAISED_BYTES_MAX else b""


def _as_base_error(error: ServeError) -> ServeError:
    """The error as its nearest base class that takes only a message, so that callers can still handle it."""
    kinds = (kind for kind in type(error).__mro__ if issubclass(kind, ServeError))
    base_error = next(kind for kind in kinds if kind.__init__ is ServeError.__init__)(str(error))
    retained = {name: value for name, value in vars(error).items() if name in _RETAINED_ATTRIBUTES}
    vars(base_error).update(retained)
    return base_error


def _as_plain(value: Any) -> Any:
    if isinstance(value, str):  # of a class of its own, such as a replica's id
        return str(value)
    if hasattr(value, "model_dump"):  # pydantic
        return value.model_dump()
    if hasattr(value, "tolist"):  # numpy's arrays and numbers, torch's tensors
        return value.tolist()
    raise TypeError(f"it holds a {type(value).__name__}")


_msgpack = msgspec.msgpack.Encoder(enc_hook=_as_plain)
