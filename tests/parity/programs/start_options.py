import requests
from ray import serve

serve.start(http_options={"request_timeout_s": 1})


@serve.deployment
class S:
    async def __call__(self, request):
        import asyncio

        await asyncio.sleep(float(request.query_params.get("s", 0)))
        return "done"


serve.run(S.bind())
print(requests.get("http://127.0.0.1:8000/").text)
r = requests.get("http://127.0.0.1:8000/?s=3")
print(r.status_code >= 400)
serve.shutdown()
