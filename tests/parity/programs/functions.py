import requests
from starlette.requests import Request
from ray import serve


@serve.deployment
def greet(request: Request) -> str:
    name = request.query_params.get("name", "nobody")
    return f"Hello {name}"


@serve.deployment
async def echo(request: Request):
    body = await request.body()
    return {"body": body.decode(), "type": request.headers.get("content-type")}


@serve.deployment
def no_args():
    return "none taken"


@serve.deployment
def plus(a, b=1):
    return a + b


@serve.deployment
class UsesFunction:
    def __init__(self, f, factor=lambda x: x * 10):
        self.f = f
        self.factor = factor

    async def __call__(self, request):
        x = int((await request.json())["x"])
        return self.factor(await self.f.remote(x, b=5))


base = "http://127.0.0.1:8000"
serve.run(greet.bind(), route_prefix="/greet", name="greet")
serve.run(echo.bind(), route_prefix="/echo", name="echo")
h = serve.run(no_args.bind(), route_prefix="/none", name="none")
serve.run(UsesFunction.bind(plus.bind()), route_prefix="/uses", name="uses")
print(requests.get(base + "/greet?name=Ann").text)
print(requests.post(base + "/echo", data="raw body").json())
print(requests.post(base + "/echo", json={"a": 1}).json())
print(requests.get(base + "/none").text)
print(h.remote().result())
print(requests.post(base + "/uses", json={"x": 3}).text)
print(greet.name, type(greet).__name__, echo.num_replicas)
try:
    greet()
except RuntimeError as e:
    print(e)
try:
    UsesFunction()
except RuntimeError as e:
    print(e)
