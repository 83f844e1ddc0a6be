import asyncio
from typing import List

import numpy as np
import requests
from concurrent.futures import ThreadPoolExecutor
from starlette.requests import Request
from ray import serve


@serve.deployment
class Model:
    def __init__(self):
        self.sizes = []

    @serve.batch(max_batch_size=8, batch_wait_timeout_s=0.3)
    async def __call__(self, multiple_samples: List[int]) -> List[int]:
        self.sizes.append(len(multiple_samples))
        # Use numpy's vectorized computation to efficiently process a batch.
        return (np.array(multiple_samples) * 2).tolist()

    @serve.batch(max_batch_size=4, batch_wait_timeout_s=0.2)
    async def http(self, requests: List[Request]) -> List[str]:
        return [r.query_params["x"] for r in requests]

    def biggest(self):
        return max(self.sizes) > 1

    @serve.batch(max_batch_size=4, batch_wait_timeout_s=0.1)
    async def wrong(self, xs):
        return [1]

    @serve.batch(max_batch_size=2, batch_wait_timeout_s=0.1)
    async def mixed(self, xs):
        return [ValueError("odd") if x % 2 else x for x in xs]

    def reconf(self):
        self.__class__.http._get_max_batch_size if False else None
        return True


handle = serve.run(Model.bind())
responses = [handle.remote(i) for i in range(5)]
print([r.result() for r in responses])
print(handle.biggest.remote().result())
rs = [handle.wrong.remote(i) for i in range(2)]
for r in rs:
    try:
        print(r.result())
    except Exception as e:
        print("error")
