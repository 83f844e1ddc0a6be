from pydantic import BaseModel
import requests
from ray import serve
from ray.serve import Application


class HelloWorldArgs(BaseModel):
    message: str
    times: int = 1


@serve.deployment
class HelloWorld:
    def __init__(self, message: str):
        self._message = message
        print("Message:", self._message)

    def __call__(self, request):
        return self._message


def typed_app_builder(args: HelloWorldArgs) -> Application:
    return HelloWorld.bind(args.message * args.times)


def dict_builder(args: dict) -> Application:
    return HelloWorld.options(num_replicas=int(args.get("replicas", 1))).bind(args["message"])


serve.run(typed_app_builder(HelloWorldArgs(message="hey", times=2)))
print(requests.get("http://localhost:8000/").text)
serve.run(dict_builder({"message": "bye", "replicas": "2"}))
print(requests.get("http://localhost:8000/").text)
print(serve.status().applications["default"].deployments["HelloWorld"].replica_states)
