import dataclasses
import enum

import numpy as np
import requests
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import JSONResponse, HTMLResponse, PlainTextResponse, RedirectResponse, Response
from ray import serve


class Model(BaseModel):
    a: int = 1
    b: str = "x"


class Color(enum.Enum):
    RED = "red"


@dataclasses.dataclass
class Point:
    x: int
    y: int


VALUES = {
    "str": lambda: "text é",
    "bytes": lambda: b"raw\x00bytes",
    "dict": lambda: {"a": [1, 2.5, None, True], "é": "ü"},
    "list": lambda: [1, "two", {"three": 3}],
    "int": lambda: 7,
    "float": lambda: 1.5,
    "bool": lambda: True,
    "none": lambda: None,
    "tuple": lambda: (1, 2),
    "set": lambda: {3},
    "model": lambda: Model(),
    "enum": lambda: Color.RED,
    "dataclass": lambda: Point(1, 2),
    "array": lambda: np.array([1, 2, 3]),
    "np_float": lambda: np.float64(2.5),
    "np_int": lambda: np.int64(2),
    "nested_array": lambda: {"a": np.array([[1.0, 2.0]])},
    "json": lambda: JSONResponse({"a": 1}, status_code=201, headers={"x-own": "1"}),
    "html": lambda: HTMLResponse("<b>x</b>"),
    "plain": lambda: PlainTextResponse("plain", status_code=418),
    "redirect": lambda: RedirectResponse("/elsewhere"),
    "response": lambda: Response(b"x", media_type="application/x-own"),
    "empty": lambda: Response(status_code=204),
    "model_list": lambda: [Model(), Model(a=2)],
    "int_keys": lambda: {1: 2},
}


@serve.deployment
class Values:
    def __call__(self, request: Request):
        return VALUES[request.query_params["kind"]]()


serve.run(Values.bind())
for kind in VALUES:
    r = requests.get("http://127.0.0.1:8000/", params={"kind": kind}, allow_redirects=False)
    print(
        kind,
        r.status_code,
        r.headers.get("content-type"),
        r.headers.get("x-own"),
        r.headers.get("location"),
        r.content,
    )
