from typing import AsyncGenerator, Generator

import requests
from ray import serve
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator
from starlette.responses import StreamingResponse


@serve.deployment
class Streamer:
    def __call__(self, limit: int) -> Generator[int, None, None]:
        for i in range(limit):
            yield i

    async def letters(self, word: str) -> AsyncGenerator[str, None]:
        for letter in word:
            yield letter

    def fails(self):
        yield 1
        raise RuntimeError("half way")

    def plain(self):
        return 1


@serve.deployment
class Caller:
    def __init__(self, streamer: DeploymentHandle):
        self._streamer = streamer.options(stream=True)

    async def __call__(self, request):
        gen: DeploymentResponseGenerator = self._streamer.remote(4)
        numbers = [i async for i in gen]

        async def out():
            async for letter in self._streamer.letters.remote("hey"):
                yield letter
            yield str(numbers)

        return StreamingResponse(out(), media_type="text/plain")


h = serve.run(Caller.bind(Streamer.bind()))
print(requests.get("http://127.0.0.1:8000/").text)
s = serve.get_deployment_handle("Streamer", "default")
gen = s.options(stream=True).remote(3)
print(type(gen).__name__, list(gen))
print(list(s.options(stream=True, method_name="letters").remote("abc")))
g = s.options(stream=True).fails.remote()
print(next(g))
try:
    next(g)
except RuntimeError as e:
    print("RuntimeError", "half way" in str(e))
try:
    print(list(s.options(stream=True).plain.remote()))
except Exception as e:
    print(type(e).__name__ in ("TypeError", "RayTaskError(TypeError)"), isinstance(e, TypeError))
try:
    s.remote(3).result()
except Exception as e:
    print(isinstance(e, TypeError))
