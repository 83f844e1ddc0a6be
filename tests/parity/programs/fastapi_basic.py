import requests
from fastapi import FastAPI
from ray import serve

app = FastAPI()


@serve.deployment
@serve.ingress(app)
class FastAPIDeployment:
    # FastAPI will automatically parse the HTTP request for us.
    @app.get("/hello")
    def say_hello(self, name: str) -> str:
        return f"Hello {name}!"

    @app.get("/item/{item_id}")
    async def item(self, item_id: int, q: str = "none"):
        return {"id": item_id, "q": q}


serve.run(FastAPIDeployment.bind(), route_prefix="/")
base = "http://localhost:8000"
for path in [
    "/hello?name=Theodore",
    "/hello",
    "/item/3?q=x",
    "/item/a",
    "/nothing",
    "/item/3/",
    "/openapi.json",
]:
    r = requests.get(base + path)
    print(
        path,
        r.status_code,
        r.headers["content-type"],
        r.text if path != "/openapi.json" else sorted(r.json()["paths"]),
    )
r = requests.post(base + "/hello?name=x")
print(r.status_code, r.text, r.headers.get("allow"))
