"""Code as bytes: equal for equal code in every process, and loadable where the code is not."""

from __future__ import annotations

import io
import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from fastapi import APIRouter, FastAPI

from muster.sdk.code import CodePickler, CodeUnpicklable, dump_code
from serve_common.errors import LimitReached
from serve_common.protocol import code as protocol
from serve_common.protocol.code import digest_code
from serve_replica_host.replica.user.code import UserCodeUnusable, load_code

PROGRAM = """
import dataclasses, enum, functools
import muster as serve
from muster.sdk.build import build_app

WORDS = {"alpha", "beta", "gamma", "delta", "epsilon"}

class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"

@dataclasses.dataclass
class Item:
    name: str
    tags: frozenset = frozenset({"x", "yy", "zzz"})
    color: Color = Color.RED

def known(word):
    return word in WORDS, Color.BLUE

@serve.deployment
class Child:
    def __init__(self, words):
        self.words = words
    def __call__(self, word):
        import os.path
        return known(word), os.path.join("a", "b")

@serve.deployment
class Parent:
    def __init__(self, child, *, item, call):
        self.child, self.item, self.call = child, item, call
    async def __call__(self, request):
        return Item("new"), [n for n in ("a", "b", "a")], (1, "two", None)

app = Parent.bind(Child.bind({"s", "t", "uu"}), item=Item("i"), call=functools.partial(known, "beta"))
if __name__ == "__main__":
    for each in build_app(app, name="default", route_prefix="/").deployments:
        print(each.name, each.digest)
"""


def run(path: Path, seed: int) -> str:
    environment = {**os.environ, "PYTHONHASHSEED": str(seed)}
    return subprocess.run(
        [sys.executable, str(path)], env=environment, check=True, capture_output=True, text=True, timeout=60
    ).stdout


def test_the_same_script_gives_the_same_digests_in_every_process(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    first = run(script, 1)
    assert [line.split()[0] for line in first.splitlines()] == ["Child", "Parent"]
    assert run(script, 2) == first
    script.write_text(PROGRAM.replace('"two"', '"three"'))
    changed = run(script, 3)
    assert changed.splitlines()[0] == first.splitlines()[0]
    assert changed.splitlines()[1] != first.splitlines()[1]


FASTAPI_PROGRAM = """
import sys
from fastapi import FastAPI
from pydantic import BaseModel

import muster as serve
from muster.sdk.build import build_app

api = FastAPI()

class Item(BaseModel):
    name: str
    inner: "Item | None" = None

@serve.deployment
@serve.ingress(api)
class Web:
    @api.post("/item")
    async def item(self, item: Item) -> Item:
        return item

if __name__ == "__main__":
    sys.unused = [object() for _ in range(int(sys.argv[1]))]
    [web] = build_app(Web.bind(Item(name="app.Item:123456789")), name="default", route_prefix="/").deployments
    sys.stdout.buffer.write(web.code)
"""


def test_a_fastapi_application_with_models_travels_by_value_and_has_one_digest(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(FASTAPI_PROGRAM)
    first, second = (
        subprocess.run(
            [sys.executable, str(script), number], check=True, capture_output=True, timeout=60
        ).stdout
        for number in ("1", "200000")
    )
    assert digest_code(first) == digest_code(second)
    target, args, _ = load_code(first, digest_code(first))
    assert target.__name__ == "Web"
    assert args[0].name == "app.Item:123456789", "a text of the user's is no name of a class"
    assert type(args[0]).model_validate({"name": "a", "inner": {"name": "b"}}).inner.name == "b"


def make_class() -> type:
    class Local:
        def __init__(self, number: int, *, words: set[str]) -> None:
            self.number, self.words = number, words

        def __call__(self) -> tuple[int, list[str]]:
            return self.number, sorted(self.words)

    return Local


def test_a_class_that_no_module_has_travels_by_value() -> None:
    data = dump_code(make_class(), (3,), {"words": {"b", "a"}}, name="Local")
    target, args, kwargs = load_code(data, digest_code(data))
    assert target(*args, **kwargs)() == (3, ["a", "b"])


def list_words() -> list[str]:
    return ["alpha"]


def test_a_fastapi_application_travels_with_its_state() -> None:
    app, router = FastAPI(), APIRouter()
    app.state.limit = 3
    router.add_api_route("/plain", list_words)
    app.include_router(router, prefix="/r")
    with io.BytesIO() as file:
        CodePickler(file).dump(app)
        restored = pickle.loads(file.getvalue())
    assert restored.state.limit == 3
    assert "/r/plain" in restored.openapi()["paths"]


def test_what_cannot_be_pickled_is_named() -> None:
    with pytest.raises(CodeUnpicklable, match=r"Model\['kwargs'\]\['config'\]\[1\]") as raised:
        dump_code(make_class(), (), {"config": [1, threading.Lock()]}, name="Model")
    assert "_thread.lock" in str(raised.value)
    lock = threading.Lock()

    class Locked:
        def __call__(self) -> bool:
            return lock.locked()

    with pytest.raises(CodeUnpicklable, match="variable lock"):
        dump_code(Locked, (), {}, name="Model")


def test_code_that_is_too_large_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "CODE_BYTES_MAX", 1000)
    with pytest.raises(LimitReached, match="load large models in the constructor"):
        dump_code(make_class(), (b"x" * 1000,), {}, name="Model")


def test_changed_code_and_code_of_other_versions_is_never_loaded() -> None:
    data = dump_code(make_class(), (3,), {}, name="Local")
    with pytest.raises(UserCodeUnusable, match=digest_code(data)):
        load_code(data[:-1] + b"x", digest_code(data))
    header, _, body = data.partition(b"\n")
    other = header.replace(b"python 3", b"python 2") + b"\n" + body
    with pytest.raises(UserCodeUnusable, match=r"python 2.*python 3"):
        load_code(other, digest_code(other))
