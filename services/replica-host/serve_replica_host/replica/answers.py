"""What user code returns, as an HTTP answer; the rules are Ray Serve's."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any, Final

import msgspec
from starlette.responses import FileResponse, Response, StreamingResponse

from serve_common.wires.frames import Headers

_JSON: Final[Headers] = [(b"content-type", b"application/json")]
TEXT: Final[Headers] = [(b"content-type", b"text/plain; charset=utf-8")]
_BYTES: Final[Headers] = [(b"content-type", b"text/plain")]


class NotAnAnswer(TypeError):
    """The user's code returned something that cannot be sent; the message says what."""


class WholeAnswer(msgspec.Struct, frozen=True, gc=False):
    """An answer that is all there."""

    status: int
    headers: Headers
    body: bytes


def _as_json(value: Any) -> Any:
    if hasattr(value, "model_dump"):  # pydantic
        return value.model_dump()
    if hasattr(value, "tolist"):  # numpy's arrays and numbers, torch's tensors
        return value.tolist()
    raise NotImplementedError(type(value).__name__)


class PlainStream(msgspec.Struct, frozen=True, gc=False):
    """A plain generator: it is run in a thread, for it may block."""

    iterator: Iterator[Any]


_encoder = msgspec.json.Encoder(enc_hook=_as_json)


def to_answer(result: Any) -> WholeAnswer | PlainStream | Response:
    """``result`` as an answer; a `Response` stands for one that is streamed by running it as an ASGI application.

    Raises `NotAnAnswer`.
    """
    if type(result) is bytes:
        return WholeAnswer(200, _BYTES, result)
    if isinstance(result, bytes | bytearray | memoryview):
        return WholeAnswer(200, _BYTES, bytes(result))
    if isinstance(result, str):
        return WholeAnswer(200, TEXT, result.encode())
    if isinstance(result, Response):
        if isinstance(result, StreamingResponse | FileResponse) or result.background is not None:
            return result
        return WholeAnswer(result.status_code, result.raw_headers, bytes(result.body))
    if inspect.isgenerator(result):
        return PlainStream(result)
    if inspect.isasyncgen(result):
        pieces: Any = result
        return StreamingResponse(pieces, media_type="text/plain")
    return WholeAnswer(200, _JSON, encode_json(result))


def encode_json(value: Any) -> bytes:
    """``value`` as JSON; numpy and pydantic values too. Raises `NotAnAnswer`."""
    try:
        return _encoder.encode(value)
    except NotImplementedError as error:
        raise NotAnAnswer(
            f"the returned value holds a {error}, which is not JSON; "
            "return JSON values, str, bytes or a starlette Response"
        ) from error
    except (TypeError, ValueError, RecursionError) as error:
        raise NotAnAnswer(f"the returned {type(value).__name__} cannot be sent as JSON: {error}") from error
