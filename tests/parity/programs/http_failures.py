import asyncio
import threading
import time

import requests
from fastapi import FastAPI
from fastapi.responses import PlainTextResponse
from ray import serve

BASE = "http://127.0.0.1:8000"


@serve.deployment(graceful_shutdown_timeout_s=0)
class Slow:
    async def __call__(self, request=None):
        await asyncio.sleep(30)


@serve.deployment(max_ongoing_requests=1, max_queued_requests=1, graceful_shutdown_timeout_s=0)
class Small:
    async def __call__(self, request=None):
        await asyncio.sleep(1.5)
        return "ok"


@serve.deployment(graceful_shutdown_timeout_s=0)
class Parent:
    def __init__(self, child):
        self.child = child

    async def __call__(self, request):
        return await self.child.remote()


api = FastAPI()


@serve.deployment(graceful_shutdown_timeout_s=0)
@serve.ingress(api)
class Api:
    def __init__(self, child):
        self.child = child

    @api.get("/")
    async def root(self):
        return PlainTextResponse(await self.child.remote())


def show(name, response):
    text = response.text
    for known in ("Request dropped due to backpressure", "timed out"):
        if known in text:
            text = known
    print(name, response.status_code, response.headers.get("retry-after"), text)


def crowd(name, url):
    """One is served, one waits, and the third is refused."""
    threads = [threading.Thread(target=requests.get, args=(url,)) for _ in range(2)]
    for thread in threads:
        thread.start()
        time.sleep(0.3)
    show(name, requests.get(url))
    for thread in threads:
        thread.join()


serve.start(http_options={"request_timeout_s": 8})
configured = {"status_code": 429, "retry_after_s": 7}
serve.run(Small.bind(), name="small", route_prefix="/small")
crowd("small", BASE + "/small")
serve.run(Small.options(backpressure_config=configured).bind(), name="small", route_prefix="/small")
crowd("configured", BASE + "/small")
serve.run(Parent.bind(Small.bind()), name="parent", route_prefix="/parent")
crowd("parent", BASE + "/parent")
serve.run(Api.bind(Small.bind()), name="api", route_prefix="/api")
crowd("api", BASE + "/api")
serve.run(Slow.bind(), name="slow", route_prefix="/slow")
serve.run(Parent.bind(Slow.bind()), name="slow-parent", route_prefix="/slow-parent")
serve.run(Api.bind(Slow.bind()), name="slow-api", route_prefix="/slow-api")
slow = {}


def ask(name):
    slow[name] = requests.get(f"{BASE}/{name}")


threads = [threading.Thread(target=ask, args=(name,)) for name in ("slow", "slow-parent", "slow-api")]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
for name in sorted(slow):
    show(name, slow[name])
print("Path '/nowhere' not found" in requests.get(BASE + "/nowhere").text)
