"""The example is what a new user meets first, evaluate.py the witness of failure tests: neither may lie."""

from __future__ import annotations

import asyncio
import importlib.util
import io
import json
import socket
import struct
import sys
import uuid
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from PIL import Image
from starlette.requests import Request
from starlette.responses import JSONResponse

from tests.support.paths import ROOT

EXAMPLES = ROOT / "examples"


def load_module(directory: Path, name: str):
    spec = importlib.util.spec_from_file_location(f"example_{name}", directory / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module", autouse=True)
def example_on_path():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES / "digits"))
        yield
        for name in (
            "split",
            "pixels",
            "images",
            "tally",
            "asking",
            "example_images",
            "example_tally",
            "example_split",
            "example_digits",
            "example_evaluate",
            "example_noop",
            "example_failing",
        ):
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def digits(example_on_path):
    return load_module(EXAMPLES / "digits", "digits")


@pytest.fixture(scope="module")
def evaluate(example_on_path):
    return load_module(EXAMPLES / "digits", "evaluate")


@pytest.fixture(scope="module")
def images(example_on_path):
    return load_module(EXAMPLES / "digits", "images")


@pytest.fixture(scope="module")
def trained(digits):
    return digits.Digits()


@pytest.fixture
def model(trained):
    trained.reconfigure({})
    return trained


@pytest.fixture(scope="module")
def held_out(example_on_path):
    return load_module(EXAMPLES / "digits", "split").held_out_part()


def request_of(body: bytes = b"", content_type: str | None = None, method: str = "POST") -> Request:
    headers = [] if content_type is None else [(b"content-type", content_type.encode())]
    scope = {"type": "http", "method": method, "path": "/", "query_string": b"", "headers": headers}

    async def receive():
        return {"type": "http.request", "body": body, "more_body": False}

    return Request(scope, receive)


async def refusal_of(model, body: bytes, content_type: str | None, status: int = 400) -> dict:
    response = await model(request_of(body, content_type))
    assert isinstance(response, JSONResponse), response
    assert response.status_code == status
    error = json.loads(response.body)["error"]
    assert set(error) == {"code", "message"}
    return error


def png_of(image: Image.Image) -> bytes:
    out = io.BytesIO()
    image.save(out, format="PNG")
    return out.getvalue()


def png_chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png_header(width: int, height: int) -> bytes:
    return png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))


SIGNATURE = b"\x89PNG\r\n\x1a\n"


# --- the model


def test_the_parts_are_disjoint_complete_and_balanced(evaluate):
    split = sys.modules["split"]
    training, held_out = split.training_part(), split.held_out_part()
    assert (len(training.labels), len(held_out.labels)) == (1198, 599)
    assert not {row.tobytes() for row in training.pixels} & {row.tobytes() for row in held_out.pixels}
    assert np.bincount(held_out.labels).min() >= 50


def test_held_out_images_sent_as_png_are_read_with_at_least_97_percent_accuracy(model, images):
    pixels = sys.modules["pixels"]
    cases = images.held_out_cases()
    answers = [model.classify(pixels.pixels_from_body(case.png, "image/png"))["digit"] for case in cases]
    right = sum(answer == case.label for answer, case in zip(answers, cases, strict=True))
    assert right / len(cases) >= 0.97


async def test_a_png_and_its_pixels_as_json_get_the_same_digit(model, images, held_out):
    for pixels in held_out.pixels[:10]:
        flat = json.dumps({"pixels": pixels.tolist()}).encode()
        rows = json.dumps({"pixels": pixels.reshape(8, 8).tolist()}).encode()
        from_png = await model(request_of(images.encode_png(pixels), "image/png"))
        from_flat = await model(request_of(flat, "application/json; charset=utf-8"))
        assert from_flat == await model(request_of(rows, "application/json"))
        assert from_png["digit"] == from_flat["digit"]
        assert from_png["confidence"] == pytest.approx(from_flat["confidence"], abs=0.01)


async def test_an_answer_has_a_digit_its_confidence_and_all_probabilities(model, images, held_out):
    answer = await model(request_of(images.encode_png(held_out.pixels[0]), "image/png"))
    assert set(answer) == {"digit", "confidence", "probabilities"}
    assert json.loads(json.dumps(answer)) == answer
    assert list(answer["probabilities"]) == [str(digit) for digit in range(10)]
    assert sum(answer["probabilities"].values()) == pytest.approx(1, abs=1e-4)
    assert answer["confidence"] == max(answer["probabilities"].values())
    assert answer["probabilities"][str(answer["digit"])] == answer["confidence"]


async def test_content_wins_over_the_form_type_that_curl_declares(model, images, held_out):
    form = "application/x-www-form-urlencoded"
    as_png = await model(request_of(images.encode_png(held_out.pixels[0]), form))
    body = json.dumps({"pixels": held_out.pixels[0].tolist()}).encode()
    assert as_png["digit"] == (await model(request_of(b"\n " + body, form)))["digit"] == held_out.labels[0]
    assert (await model(request_of(body, None)))["digit"] == held_out.labels[0]


async def test_the_committed_sample_is_a_held_out_digit_that_is_unsure_at_99_percent(model, images, tmp_path):
    sample = (EXAMPLES / "digits" / "sample.png").read_bytes()
    digit = images.write_sample(tmp_path / "again.png")
    with Image.open(tmp_path / "again.png") as again, Image.open(io.BytesIO(sample)) as committed:
        assert again.tobytes() == committed.tobytes()
    assert (await model(request_of(sample, "image/png")))["digit"] == digit == 7
    model.reconfigure({"threshold": 0.99})
    assert (await model(request_of(sample, "image/png")))["digit"] == "unsure"


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "I;16"])
async def test_every_kind_of_png_shows_the_same_digit(model, held_out, mode):
    pixels = held_out.pixels[0]  # a 0, which still is one in mere black and white
    gray = Image.fromarray(np.rint(pixels.reshape(8, 8) * 255 / 16).astype(np.uint8))
    large = gray.resize((96, 96), Image.Resampling.NEAREST)
    if mode == "I;16":
        image = Image.fromarray(np.asarray(large, dtype=np.uint16) * 257)
        assert image.mode == mode
    else:
        image = large.convert(mode, dither=Image.Dither.NONE)
    assert (await model(request_of(png_of(image), "image/png")))["digit"] == held_out.labels[0]


async def test_transparent_parts_count_as_dark_ground(model, held_out):
    ink = np.rint(held_out.pixels[3].reshape(8, 8) * 255 / 16).astype(np.uint8)
    white_with_alpha = np.dstack([np.full((8, 8, 3), 255, np.uint8), ink])
    answer = await model(request_of(png_of(Image.fromarray(white_with_alpha)), "image/png"))
    assert answer["digit"] == held_out.labels[3]


@pytest.mark.parametrize("method", ["GET", "HEAD"])
async def test_get_explains_what_to_send(model, method):
    usage = await model(request_of(method=method))
    assert set(usage["send"]) == {"image/png", "application/json"}


async def test_another_method_is_refused_and_told_what_is_allowed(model):
    response = await model(request_of(method="DELETE"))
    assert response.status_code == 405
    assert response.headers["allow"] == "GET, HEAD, POST"


# --- configuration, loading, health


def test_reconfigure_replaces_the_threshold_and_an_empty_config_resets_it(model, held_out):
    model.reconfigure({"threshold": 1})
    assert model.classify(np.zeros(64))["digit"] == "unsure"
    model.reconfigure({"threshold": 0.5})
    assert model.classify(held_out.pixels[3])["digit"] == held_out.labels[3]
    model.reconfigure({})
    assert model.classify(np.zeros(64))["digit"] in range(10)


@pytest.mark.parametrize(
    ("user_config", "field"),
    [
        ([], "user_config:"),
        (None, "user_config:"),
        ({"treshold": 0.5}, "user_config.treshold"),
        ({"threshold": 0.5, "x": 1}, "user_config.x"),
        ({"threshold": "0.5"}, "user_config.threshold"),
        ({"threshold": None}, "user_config.threshold"),
        ({"threshold": True}, "user_config.threshold"),
        ({"threshold": -0.01}, "user_config.threshold"),
        ({"threshold": 1.01}, "user_config.threshold"),
        ({"threshold": float("nan")}, "user_config.threshold"),
        ({"threshold": 10**400}, "user_config.threshold"),
    ],
)
def test_a_bad_user_config_is_refused_by_field_and_changes_nothing(model, user_config, field):
    model.reconfigure({"threshold": 1.0})
    with pytest.raises(ValueError, match=field.replace(".", r"\.")):
        model.reconfigure(user_config)
    assert model.classify(np.zeros(64))["digit"] == "unsure"


def test_the_weights_in_the_repository_are_what_training_makes(digits, model, held_out):
    trained = digits.Digits(model_path="train")
    for pixels in held_out.pixels[:50]:
        bundled, fresh = (m.classify(pixels)["probabilities"] for m in (model, trained))
        assert bundled == pytest.approx(fresh, abs=1e-3)


def test_saved_weights_are_loaded_and_answer_alike(digits, model, held_out, tmp_path):
    model._weights.save(tmp_path / "weights.npz")
    loaded = digits.Digits(model_path=str(tmp_path / "weights.npz"))
    assert loaded.classify(held_out.pixels[0]) == model.classify(held_out.pixels[0])


def test_a_missing_file_and_a_file_of_something_else_fail_the_constructor(digits, model, tmp_path):
    with pytest.raises(FileNotFoundError):
        digits.Digits(model_path=str(tmp_path / "absent"))
    (tmp_path / "text.npz").write_text("not weights")
    with pytest.raises(ValueError, match="holds no weights"):
        digits.Digits(model_path=str(tmp_path / "text.npz"))
    np.savez(tmp_path / "other.npz", something=np.zeros(3))
    with pytest.raises(ValueError, match="holds no weights"):
        digits.Digits(model_path=str(tmp_path / "other.npz"))
    w = model._weights
    shapes = {"examples": w.examples[:, :9], "matrix": w.matrix, "bias": w.bias, "gamma": w.gamma}
    np.savez(tmp_path / "small.npz", **shapes)
    with pytest.raises(ValueError, match="are not of 64 inputs"):
        digits.Digits(model_path=str(tmp_path / "small.npz"))


def test_check_health_passes_and_fails_when_the_model_gives_nonsense(digits, model, monkeypatch):
    model.check_health()
    monkeypatch.setattr(model, "_weights", replace(model._weights, examples=model._weights.examples * np.nan))
    with pytest.raises(RuntimeError, match="probabilities"):
        model.check_health()


# --- bad input


NOT_AN_IMAGE = b"to whom it may concern\n"


@pytest.mark.parametrize(
    ("body", "content_type", "code", "part_of_message"),
    [
        (b"", "image/png", "empty_body", "body"),
        (NOT_AN_IMAGE, "image/png", "not_a_png", "image/png"),
        (b'{"pixels": []}', "image/png", "not_a_png", "body"),
        (b"\xff\xd8\xff\xe0 jpeg", "image/jpeg", "not_a_png", "image/jpeg"),
        (NOT_AN_IMAGE, "application/x-www-form-urlencoded", "unknown_content", "neither"),
        (NOT_AN_IMAGE, None, "unknown_content", "none"),
        (NOT_AN_IMAGE, "text/" + "x" * 5000, "unknown_content", "neither"),
        (b"{", "application/json", "bad_json", "body"),
        (b"\xff\xfe\x00", "application/json", "bad_json", "body"),
        (b"[" * 15000, "application/json", "bad_json", "body"),
        (b"9" * 10000, "application/json", "bad_json", "body"),
        (b"[]", "application/json", "bad_json", "a list"),
        (b"7", "application/json", "bad_json", "a number"),
        (b" " * 16385, "application/json", "json_too_large", "16385"),
        (b"{}", "application/json", "missing_field", "pixels"),
        (b'{"pixels": [], "pix": 1}', "application/json", "unknown_field", "pix:"),
        (b'{"pixels": null}', "application/json", "bad_pixels", "null"),
        (b'{"pixels": "0"}', "application/json", "bad_pixels", "a string"),
        (b'{"pixels": []}', "application/json", "bad_pixels", "not 0 values"),
        (json.dumps({"pixels": [0] * 63}).encode(), "application/json", "bad_pixels", "not 63 values"),
        (json.dumps({"pixels": [0] * 8}).encode(), "application/json", "bad_pixels", "not 8 values"),
        (json.dumps({"pixels": [[0] * 8] * 7 + [[0] * 9]}).encode(), None, "bad_pixels", "pixels[7]"),
        (json.dumps({"pixels": [[0] * 8] * 7 + [0]}).encode(), None, "bad_pixels", "pixels[7]"),
        (
            json.dumps({"pixels": [[0] * 8] * 7 + [[0] * 7 + ["1"]]}).encode(),
            None,
            "bad_pixels",
            "pixels[7][7]",
        ),
        (json.dumps({"pixels": [0] * 63 + [16.01]}).encode(), None, "bad_pixels", "pixels[63]"),
        (json.dumps({"pixels": [-1] + [0] * 63}).encode(), None, "bad_pixels", "pixels[0]"),
        (json.dumps({"pixels": [True] + [0] * 63}).encode(), None, "bad_pixels", "a boolean"),
        (json.dumps({"pixels": [[[]]] + [0] * 63}).encode(), None, "bad_pixels", "a list"),
        (json.dumps({"pixels": [float("nan")] + [0] * 63}).encode(), None, "bad_json", "NaN"),
        (json.dumps({"pixels": [float("-inf")] + [0] * 63}).encode(), None, "bad_json", "-Infinity"),
        (b'{"pixels": [1e999' + b", 0" * 63 + b"]}", None, "bad_pixels", "pixels[0]"),
    ],
)
async def test_unreadable_content_gets_400_and_a_reason(model, body, content_type, code, part_of_message):
    error = await refusal_of(model, body, content_type)
    assert error["code"] == code
    assert part_of_message in error["message"]
    assert len(error["message"]) < 400


async def test_a_png_cut_off_anywhere_is_refused(model, images, held_out):
    whole = images.encode_png(held_out.pixels[0], scale=4)
    for length in range(len(SIGNATURE), len(whole)):
        error = await refusal_of(model, whole[:length], "image/png")
        assert error["code"] == "bad_png", length


async def test_a_png_with_a_flipped_byte_is_answered_or_refused_but_never_a_server_error(
    model, images, held_out
):
    whole = images.encode_png(held_out.pixels[0], scale=4)
    for position in range(len(SIGNATURE), len(whole)):
        spoiled = bytearray(whole)
        spoiled[position] ^= 0xFF
        response = await model(request_of(bytes(spoiled), "image/png"))
        assert isinstance(response, dict) or response.status_code == 400, position


@pytest.mark.parametrize("size", [(1025, 1024), (1, 1024 * 1024 + 1), (60000, 60000), (2**31, 2**31)])
async def test_a_decompression_bomb_is_refused_by_its_header(model, size):
    error = await refusal_of(
        model, SIGNATURE + png_header(*size) + b"anything" + png_chunk(b"IEND", b""), "image/png"
    )
    assert error["code"] == "image_too_large"
    assert str(size[0]) in error["message"]


async def test_a_second_header_cannot_smuggle_a_larger_image_in(model):
    body = (
        SIGNATURE + png_header(8, 8) + png_header(9000, 9000) + png_chunk(b"IDAT", zlib.compress(bytes(72)))
    )
    error = await refusal_of(model, body + png_chunk(b"IEND", b""), "image/png")
    assert error["code"] in {"image_too_large", "bad_png"}


async def test_a_text_chunk_that_unpacks_to_a_hundred_megabytes_is_refused(model):
    bomb = png_chunk(b"zTXt", b"comment\0\0" + zlib.compress(bytes(100 * 1024 * 1024), 9))
    body = SIGNATURE + png_header(8, 8) + bomb + png_chunk(b"IDAT", zlib.compress(bytes(72)))
    assert (await refusal_of(model, body + png_chunk(b"IEND", b""), "image/png"))["code"] == "bad_png"


async def test_an_image_without_pixels_is_refused(model):
    assert (await refusal_of(model, SIGNATURE + png_header(0, 8), "image/png"))["code"] == "bad_png"


# --- evaluate.py


@pytest.fixture
async def serve():
    """Starts a server for a handler and gives its URL."""
    servers = []

    async def start(handler) -> str:
        app = web.Application()
        app.router.add_post("/digits", handler)
        server = TestServer(app, host="127.0.0.1")
        await server.start_server()
        servers.append(server)
        return str(server.make_url("/digits"))

    yield start
    for server in servers:
        await server.close()


def handler_of(model):
    async def handle(request: web.Request) -> web.Response:
        answer = await model(request_of(await request.read(), request.content_type))
        return web.json_response(answer)

    return handle


async def run_main(evaluate, capsys, *argv: str):
    """Its own thread, because main starts its own event loop. Returns the exit code and what was printed."""
    code = await asyncio.to_thread(evaluate.main, list(argv))
    return code, capsys.readouterr()


async def test_evaluate_against_a_good_model_reports_and_exits_zero(model, evaluate, serve, capsys):
    code, printed = await run_main(evaluate, capsys, await serve(handler_of(model)), "--limit", "120")
    assert code == 0
    assert "failures    0" in printed.out
    assert "120 in" in printed.out
    assert "p99" in printed.out
    assert printed.err == ""  # no progress bar where there is no terminal


async def test_json_prints_one_object_and_repeat_sends_everything_again(model, evaluate, serve, capsys):
    url = await serve(handler_of(model))
    code, printed = await run_main(evaluate, capsys, url, "--limit", "30", "--repeat", "2", "--json")
    summary = json.loads(printed.out)
    assert (code, summary["requests"], summary["answered"], summary["failures"]) == (0, 60, 60, 0)
    assert summary["passed"] is True
    assert 0 < summary["p50_ms"] <= summary["p99_ms"]
    assert summary["requests_per_s"] > 0


async def test_every_request_has_its_own_idempotency_key_and_concurrency_is_bounded(evaluate, serve, capsys):
    keys, busy, most_busy, full = [], 0, 0, asyncio.Event()

    async def handle(request: web.Request) -> web.Response:
        nonlocal busy, most_busy
        keys.append(uuid.UUID(request.headers["Idempotency-Key"]))
        assert request.content_type == "image/png"
        busy += 1
        most_busy = max(most_busy, busy)
        if busy == 4:
            full.set()
        await full.wait()  # nobody is answered before four are waiting at once
        busy -= 1
        return web.json_response({"digit": 0})

    _, printed = await run_main(
        evaluate, capsys, await serve(handle), "--limit", "40", "--concurrency", "4", "--json"
    )
    assert json.loads(printed.out)["requests"] == 40
    assert len(set(keys)) == 40
    assert most_busy == 4


async def test_refused_requests_are_failures_grouped_by_status_with_their_first_reasons(
    evaluate, serve, capsys
):
    numbers = iter(range(1000))

    async def handle(_request: web.Request) -> web.Response:
        number = next(numbers)
        if number % 2:
            return web.Response(status=502, text="the replica died")
        return web.Response(status=503, text=f"busy {number} " + "x" * 1000)

    url = await serve(handle)
    code, printed = await run_main(evaluate, capsys, url, "--limit", "40", "--concurrency", "1", "--json")
    summary = json.loads(printed.out)
    assert (code, summary["failures"], summary["answered"], summary["accuracy"]) == (1, 40, 0, 0.0)
    kinds = summary["failures_by_kind"]
    assert kinds["502"] == {"count": 20, "first_reasons": {"the replica died": 20}}
    assert kinds["503"]["count"] == 20
    assert len(kinds["503"]["first_reasons"]) == 5
    assert max(map(len, kinds["503"]["first_reasons"])) <= 200
    code, printed = await run_main(evaluate, capsys, url, "--limit", "2")
    assert code == 1
    assert "502: 1" in printed.out
    assert "1 x the replica died" in printed.out


@pytest.mark.parametrize("answer", ['{"digit": true}', '{"digit": 10}', '{"digit": "7"}', "[]", "oops", "{}"])
async def test_a_200_without_a_digit_is_a_failure(evaluate, serve, capsys, answer):
    async def handle(_request: web.Request) -> web.Response:
        return web.Response(text=answer)

    code, printed = await run_main(evaluate, capsys, await serve(handle), "--limit", "3", "--json")
    assert code == 1
    assert json.loads(printed.out)["failures_by_kind"]["200 without a digit"]["count"] == 3


async def test_wrong_and_unsure_answers_are_no_failures_but_fail_the_run(evaluate, serve, capsys):
    async def handle(_request: web.Request) -> web.Response:
        return web.json_response({"digit": "unsure"})

    code, printed = await run_main(evaluate, capsys, await serve(handle), "--limit", "10", "--json")
    summary = json.loads(printed.out)
    assert (code, summary["failures"], summary["unsure"], summary["accuracy"]) == (1, 0, 10, 0.0)


async def test_refused_connections_and_dropped_connections_and_timeouts_are_failures(evaluate, serve, capsys):
    with socket.socket() as taken:  # bound but not listening: connections to it are refused
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/digits"
        code, printed = await run_main(evaluate, capsys, url, "--limit", "4", "--json")
    assert code == 1
    assert json.loads(printed.out)["failures_by_kind"]["connect"]["count"] == 4

    async def drop(request: web.Request) -> web.Response:
        request.transport.abort()
        return web.Response()

    code, printed = await run_main(evaluate, capsys, await serve(drop), "--limit", "4", "--json")
    assert code == 1
    assert json.loads(printed.out)["failures_by_kind"]["broken connection"]["count"] == 4

    async def hang(_request: web.Request) -> web.Response:
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    url = await serve(hang)
    code, printed = await run_main(evaluate, capsys, url, "--limit", "4", "--timeout", "0.1", "--json")
    assert code == 1
    assert json.loads(printed.out)["failures_by_kind"]["timeout"]["count"] == 4


async def test_forever_ends_after_its_seconds(model, evaluate, serve, capsys):
    url = await serve(handler_of(model))
    code, printed = await run_main(evaluate, capsys, url, "--limit", "5", "--forever", "0.3", "--json")
    summary = json.loads(printed.out)
    assert code == 0
    assert summary["requests"] > 5
    assert summary["seconds"] < 30


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["ftp://host/digits"],
        ["127.0.0.1:8000"],
        ["http://h/", "--concurrency", "0"],
        ["http://h/", "--limit", "-1"],
        ["http://h/", "--repeat", "9" * 5000],
        ["http://h/", "--timeout", "nan"],
        ["http://h/", "--repeat", "2", "--forever", "1"],
    ],
)
def test_a_wrong_command_line_exits_with_2_and_says_why(evaluate, capsys, argv):
    with pytest.raises(SystemExit) as stopped:
        evaluate.main(argv)
    assert stopped.value.code == 2
    assert "error:" in capsys.readouterr().err


def test_quantiles_are_within_one_percent(example_on_path):
    latencies = load_module(EXAMPLES / "digits", "tally").Latencies()
    assert latencies.quantile_ms(0.5) is None
    for milliseconds in range(1, 1001):
        latencies.add(milliseconds / 1000)
    assert latencies.quantile_ms(0.50) == pytest.approx(500, rel=0.011)
    assert latencies.quantile_ms(0.99) == pytest.approx(990, rel=0.011)
    assert latencies.quantile_ms(1.0) == pytest.approx(1000, rel=0.011)


# --- the two small examples


async def test_noop_answers_ok():
    assert await load_module(EXAMPLES / "noop", "noop").Noop()(request_of()) == b"ok"


def test_the_failing_example_raises_in_its_constructor():
    with pytest.raises(RuntimeError, match="on purpose"):
        load_module(EXAMPLES / "failing", "failing").RaisesInConstructor()
