import requests, time, threading
from concurrent.futures import ThreadPoolExecutor
from collections import Counter
from ray import serve
from ray.serve.exceptions import BackPressureError


@serve.deployment(max_ongoing_requests=1, max_queued_requests=1)
class S:
    async def __call__(self, r=None):
        import asyncio

        await asyncio.sleep(1)
        return "ok"


h = serve.run(S.bind())


def one(i):
    time.sleep(i * 0.05)
    r = requests.get("http://127.0.0.1:8000/")
    return r.status_code


with ThreadPoolExecutor(5) as ex:
    c = Counter(ex.map(one, range(5)))
print(c[200], c[503])
rs = [h.remote() for _ in range(6)]
out = Counter()
for r in rs:
    try:
        r.result()
        out["ok"] += 1
    except BackPressureError as e:
        out["bp"] += 1
        m = str(e)
    except Exception as e:
        out[type(e).__name__] += 1
print(out["bp"] > 0, out["ok"] > 0, sorted(out))
