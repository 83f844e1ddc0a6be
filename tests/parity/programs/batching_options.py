import asyncio
from typing import AsyncGenerator, List

from ray import serve
from starlette.requests import Request
from starlette.responses import StreamingResponse
import requests
from concurrent.futures import ThreadPoolExecutor


@serve.deployment(max_ongoing_requests=100, user_config={"size": 3})
class Streams:
    @serve.batch(max_batch_size=10, batch_wait_timeout_s=0.2)
    async def generate_numbers(self, max_list: List[int]) -> AsyncGenerator[List[str], None]:
        for i in range(max(max_list)):
            next_numbers = []
            for requested_max in max_list:
                if requested_max > i:
                    next_numbers.append(str(i))
                else:
                    next_numbers.append(StopIteration)
            yield next_numbers
            await asyncio.sleep(0.01)

    def reconfigure(self, user_config):
        self.generate_numbers.set_max_batch_size(user_config["size"])
        self.generate_numbers.set_batch_wait_timeout_s(0.1)

    async def __call__(self, request: Request) -> StreamingResponse:
        max = int(request.query_params.get("max", "5"))
        gen = self.generate_numbers(max)
        return StreamingResponse(gen, status_code=200, media_type="text/plain")


serve.run(Streams.bind())
with ThreadPoolExecutor(4) as pool:
    texts = list(pool.map(lambda n: requests.get(f"http://localhost:8000/?max={n}").text, [1, 4, 2, 6]))
print(texts)
