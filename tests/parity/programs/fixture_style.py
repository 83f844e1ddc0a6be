"""Tests as users write them: each runs an application and shuts down."""

import unittest
import requests
from ray import serve


@serve.deployment
class Counter:
    def __init__(self, start=0):
        self.n = start

    def __call__(self, request):
        self.n += 1
        return {"n": self.n}

    def get(self):
        return self.n


class TestCounter(unittest.TestCase):
    def setUp(self):
        self.handle = serve.run(Counter.bind(start=10))

    def tearDown(self):
        serve.shutdown()

    def test_http(self):
        self.assertEqual(requests.get("http://127.0.0.1:8000/").json(), {"n": 11})
        self.assertEqual(self.handle.get.remote().result(), 11)

    def test_fresh(self):
        self.assertEqual(self.handle.get.remote().result(), 10)


if __name__ == "__main__":
    result = unittest.main(exit=False, verbosity=0).result
    print(result.testsRun, len(result.failures), len(result.errors))
    for _, text in result.failures + result.errors:
        print(text)
