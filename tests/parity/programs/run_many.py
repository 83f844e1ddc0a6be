import requests
from ray import serve
from ray.serve import RunTarget


@serve.deployment
def one(request):
    return "one"


@serve.deployment
class Two:
    def __init__(self, h=None):
        self.h = h

    async def __call__(self, request):
        return "two"


handles = serve.run_many(
    [
        RunTarget(one.bind(), name="one", route_prefix="/one"),
        RunTarget(Two.bind(), name="two", route_prefix="/two"),
    ]
)
print([(h.app_name, h.deployment_name) for h in handles])
print(requests.get("http://127.0.0.1:8000/one").text, requests.get("http://127.0.0.1:8000/two").text)
for args in [dict(route_prefix="nope"), dict(route_prefix="/x/"), dict(route_prefix="/{a}"), dict(name="")]:
    try:
        serve.run(one.bind(), **args)
        print("ran", args)
    except Exception as e:
        print(type(e).__name__, e)
for bad in [one, lambda: 1, "x"]:
    try:
        serve.run(bad)
    except Exception as e:
        print(type(e).__name__)
