import requests
from fastapi import FastAPI
from ray import serve
from dataclasses import dataclass
from enum import Enum


class Color(Enum):
    RED = 1
    BLUE = 2


@dataclass
class Cfg:
    color: Color
    size: int = 3


class Base:
    def __init__(self, cfg):
        self.cfg = cfg

    def describe(self):
        return f"{self.cfg.color.name}-{self.cfg.size}"


@serve.deployment
class Child(Base):
    def __init__(self, cfg, f):
        super().__init__(cfg)
        self.f = f

    def __call__(self, request):
        return {
            "d": self.describe(),
            "f": self.f(2),
            "same": self.cfg.color is Color.RED,
            "eq": self.cfg == Cfg(Color.RED),
        }


k = 5
serve.run(Child.bind(Cfg(Color.RED), lambda x: x * k))
print(requests.get("http://127.0.0.1:8000/").json())
