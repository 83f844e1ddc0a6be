import requests
from starlette.requests import Request
from ray import serve


@serve.deployment
def show(request: Request):
    return {
        "path": request.url.path,
        "query": request.url.query,
        "root_path": request.scope["root_path"],
        "scope_path": request.scope["path"],
        "raw_path": request.scope.get("raw_path", b"").decode(),
        "method": request.method,
        "http_version": request.scope["http_version"],
        "scheme": request.url.scheme,
        "host": request.url.hostname,
        "type": request.scope["type"],
        "params": list(request.query_params.multi_items()),
    }


serve.run(show.bind(), name="one", route_prefix="/one")
serve.run(show.options(name="root").bind(), name="two", route_prefix="/")
base = "http://127.0.0.1:8000"
for path in [
    "/one",
    "/one/",
    "/one/a/b?x=1&x=2&y=",
    "/one%20two",
    "/one/%C3%A9t%C3%A9?q=%20a+b",
    "/",
    "/onetwo",
    "//double",
    "/a/../b",
]:
    r = requests.get(base + path)
    print(path, r.status_code, sorted(r.json().items()))
for method in ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"]:
    print(requests.request(method, base + "/one").json()["method"])
print(requests.head(base + "/one").status_code)
