import requests
from fastapi import FastAPI, Request
from ray import serve

app = FastAPI()


@serve.deployment
@serve.ingress(app)
class Api:
    @app.get("/")
    def root(self, request: Request):
        return {
            "url": request.url.path,
            "root_path": request.scope.get("root_path"),
            "path": request.scope["path"],
        }

    @app.get("/sub")
    def sub(self, request: Request):
        return {
            "url": request.url.path,
            "root_path": request.scope.get("root_path"),
            "path": request.scope["path"],
            "for": request.url_for("sub").path,
        }

    @app.get("/slash/")
    def slash(self):
        return "slash"


serve.run(Api.bind(), name="api", route_prefix="/api/v1")
for path in [
    "/api/v1",
    "/api/v1/",
    "/api/v1/sub",
    "/api/v1/sub/",
    "/api/v1/slash",
    "/api/v1/slash/",
    "/api/v1x",
    "/api",
    "/",
    "/api/v1/docs",
]:
    r = requests.get("http://127.0.0.1:8000" + path, allow_redirects=False)
    location = r.headers.get("location", "").split(":8000")[-1]
    print(
        path,
        r.status_code,
        r.headers.get("content-type"),
        location[-15:],
        r.text if "docs" not in path else "",
    )
print(requests.get("http://127.0.0.1:8000/api/v1/slash").status_code)
