"""What a caller may send, turned into the 64 numbers that the model knows, or refused with a reason.

Whatever comes over HTTP is untrusted: a text file, half a PNG, a small file that unpacks to gigabytes. All of
it is judged here, so that the model only ever sees 64 finite numbers between 0 and 16.
"""

from __future__ import annotations

import io
import json
import struct
import zlib
from typing import Any, NoReturn

import numpy as np
from PIL import Image

SIDE = 8
INK_MAX = 16
IMAGE_PIXELS_MAX = 1024 * 1024  # decoding takes up to 50 ms and blocks other requests
JSON_BYTES_MAX = 16 * 1024  # 64 numbers written out in full need less than 2 KiB

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
PNG_END = b"IEND\xaeB`\x82"
PNG_HEADER_BYTES = 24  # signature, chunk length, "IHDR", width, height


class BadInputError(ValueError):
    """The request's content cannot be read as a digit; `code` is for programs, `message` for people."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


def pixels_from_body(body: bytes, content_type: str) -> np.ndarray:
    """The 64 brightnesses (0..16) that `body` holds.

    The content decides before its declared type does, because `curl --data-binary @file` calls everything a
    form. Raises BadInputError.
    """
    declared = content_type.partition(";")[0].strip().lower()
    if not body:
        raise BadInputError("empty_body", 'body: is empty; send a PNG image or JSON {"pixels": [64 numbers]}')
    if body.startswith(PNG_SIGNATURE):
        return pixels_from_png(body)
    if declared.startswith("image/"):
        raise BadInputError(
            "not_a_png", f"body: is not a PNG image (Content-Type says {declared[:60]}; no PNG signature)"
        )
    if declared == "application/json" or declared.endswith("+json") or body.lstrip()[:1] == b"{":
        return pixels_from_json(body)
    raise BadInputError(
        "unknown_content",
        f"body: is neither a PNG image nor a JSON object (Content-Type: {declared[:60] or 'none'})",
    )


def pixels_from_png(body: bytes) -> np.ndarray:
    """Light ink on a dark ground, any size up to 1024 x 1024 pixels; transparent parts count as ground."""
    _refuse_oversized(_size_in_header(body))
    if PNG_END not in body:  # the decoder is content as soon as it has all rows
        raise BadInputError("bad_png", f"body: PNG image is cut off after {len(body)} bytes")
    try:
        with Image.open(io.BytesIO(body), formats=["PNG"]) as image:
            _refuse_oversized(image.size)  # a second header chunk may contradict the first
            image.load()
            small = _shrunk_to_gray(image)
    except BadInputError:
        raise
    except (
        OSError,
        SyntaxError,  # Pillow's word for a broken PNG chunk
        ValueError,
        EOFError,
        struct.error,
        zlib.error,
        Image.DecompressionBombError,
        Image.DecompressionBombWarning,
    ) as error:
        raise BadInputError("bad_png", f"body: PNG image cannot be decoded: {str(error)[:200]}") from error
    return np.asarray(small, dtype=float).reshape(SIDE * SIDE) * (INK_MAX / 255)


def pixels_from_json(body: bytes) -> np.ndarray:
    """An object `{"pixels": ...}` with 64 numbers, or 8 rows of 8, each 0 (ground) to 16 (full ink)."""
    if len(body) > JSON_BYTES_MAX:
        raise BadInputError("json_too_large", f"body: JSON is {len(body)} bytes, at most {JSON_BYTES_MAX}")
    try:
        value = json.loads(body, parse_constant=_refuse_constant)
    except BadInputError:
        raise
    except (ValueError, RecursionError) as error:
        raise BadInputError("bad_json", f"body: is not JSON: {str(error)[:200]}") from error
    if not isinstance(value, dict):
        raise BadInputError("bad_json", f'body: must be an object {{"pixels": ...}}, not {_json_kind(value)}')
    for key in value:
        if key != "pixels":
            raise BadInputError("unknown_field", f"{key[:60]}: unknown field; the only field is pixels")
    if "pixels" not in value:
        raise BadInputError("missing_field", "pixels: is missing")
    return _pixels_from_list(value["pixels"])


def _pixels_from_list(value: Any) -> np.ndarray:
    if not isinstance(value, list):
        raise BadInputError("bad_pixels", f"pixels: must be a list, not {_json_kind(value)}")
    if len(value) == SIDE and any(isinstance(row, list) for row in value):
        named = []
        for y, row in enumerate(value):
            if not isinstance(row, list) or len(row) != SIDE:
                found = f"{len(row)}" if isinstance(row, list) else _json_kind(row)
                raise BadInputError("bad_pixels", f"pixels[{y}]: must be {SIDE} numbers, not {found}")
            named += [(f"pixels[{y}][{x}]", number) for x, number in enumerate(row)]
    elif len(value) == SIDE * SIDE:
        named = [(f"pixels[{index}]", number) for index, number in enumerate(value)]
    else:
        raise BadInputError(
            "bad_pixels", f"pixels: must be 64 numbers or 8 rows of 8, not {len(value)} values"
        )
    for path, number in named:
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise BadInputError("bad_pixels", f"{path}: must be a number, not {_json_kind(number)}")
        if not 0 <= number <= INK_MAX:
            raise BadInputError("bad_pixels", f"{path}: {str(number)[:30]} is outside 0..{INK_MAX}")
    return np.array([number for _, number in named], dtype=float)


def _size_in_header(body: bytes) -> tuple[int, int]:
    """Read before any decoder sees the file, so that a decompression bomb costs nothing."""
    if len(body) < PNG_HEADER_BYTES:
        raise BadInputError("bad_png", f"body: PNG image is cut off after {len(body)} bytes")
    if body[12:16] != b"IHDR":
        raise BadInputError("bad_png", "body: PNG image does not start with its header chunk")
    width, height = struct.unpack(">II", body[16:PNG_HEADER_BYTES])
    return width, height


def _refuse_oversized(size: tuple[int, int]) -> None:
    width, height = size
    if width == 0 or height == 0:
        raise BadInputError("bad_png", f"body: PNG image has no pixels ({width} x {height})")
    if width * height > IMAGE_PIXELS_MAX:
        raise BadInputError(
            "image_too_large", f"body: PNG image is {width} x {height}, at most {IMAGE_PIXELS_MAX} pixels"
        )


def _shrunk_to_gray(image: Image.Image) -> Image.Image:
    """8 x 8 pixels of mode L; shrinks first and composites after, which is much the cheaper order."""
    if image.mode.startswith("I"):  # 16 bits a pixel; Pillow's own conversion would clip instead of scale
        wide = np.asarray(image, dtype=float)
        image = Image.fromarray(np.clip(np.rint(wide / 257), 0, 255).astype(np.uint8))
    if image.has_transparency_data:
        small = image.convert("RGBA").resize((SIDE, SIDE), Image.Resampling.BOX)
        return Image.alpha_composite(Image.new("RGBA", small.size, (0, 0, 0, 255)), small).convert("L")
    return image.convert("L").resize((SIDE, SIDE), Image.Resampling.BOX)


def _refuse_constant(name: str) -> NoReturn:
    raise BadInputError("bad_json", f"body: {name} is not a JSON number")


def _json_kind(value: Any) -> str:
    if value is None:
        return "null"
    kinds = {bool: "a boolean", str: "a string", list: "a list", dict: "an object"}
    return kinds.get(type(value), "a number")
