import requests
from fastapi import FastAPI, HTTPException
from starlette.requests import Request
from ray import serve


class Mine(Exception):
    pass


@serve.deployment
def plain(request: Request):
    kind = request.query_params["kind"]
    if kind == "value":
        raise ValueError("bad value")
    if kind == "mine":
        raise Mine("custom", 3)
    if kind == "zero":
        return 1 / 0
    if kind == "object":
        return object()
    raise HTTPException(status_code=409, detail="conflict")


app = FastAPI()


@serve.deployment
@serve.ingress(app)
class Api:
    @app.get("/value")
    def value(self):
        raise ValueError("bad value")

    @app.get("/http")
    def http(self):
        raise HTTPException(status_code=409, detail="conflict", headers={"x-own": "1"})

    @app.exception_handler(KeyError)
    async def key_error(request, error):
        from fastapi.responses import JSONResponse

        return JSONResponse({"missing": str(error)}, status_code=404)

    @app.get("/key")
    def key(self):
        raise KeyError("k")


serve.run(plain.bind(), name="plain", route_prefix="/plain")
serve.run(Api.bind(), name="api", route_prefix="/api")
base = "http://127.0.0.1:8000"
for kind in ["value", "mine", "zero", "object", "http"]:
    r = requests.get(base + "/plain", params={"kind": kind})
    print(kind, r.status_code, r.headers.get("content-type"), r.text)
for path in ["/api/value", "/api/http", "/api/key", "/missing", "/plainx"]:
    r = requests.get(base + path)
    print(path, r.status_code, r.headers.get("content-type"), r.headers.get("x-own"), r.text)
