import time
from typing import Generator

import requests
from starlette.responses import StreamingResponse
from starlette.requests import Request
from ray import serve


@serve.deployment
class StreamingResponder:
    def generate_numbers(self, max: int) -> Generator[str, None, None]:
        for i in range(max):
            yield str(i)
            time.sleep(0.05)

    async def agen(self):
        for i in range(3):
            yield f"chunk {i}\n".encode()

    def __call__(self, request: Request) -> StreamingResponse:
        if request.query_params.get("kind") == "async":
            return StreamingResponse(self.agen(), media_type="text/event-stream")
        max = request.query_params.get("max", "25")
        gen = self.generate_numbers(int(max))
        return StreamingResponse(gen, status_code=200, media_type="text/plain")


serve.run(StreamingResponder.bind())

r = requests.get("http://localhost:8000?max=10", stream=True)
r.raise_for_status()
print(r.status_code, r.headers["content-type"], r.headers.get("transfer-encoding"))
print("".join(chunk for chunk in r.iter_content(chunk_size=None, decode_unicode=True)))
r = requests.get("http://localhost:8000?kind=async", stream=True)
print(r.headers["content-type"], list(r.iter_lines()))
