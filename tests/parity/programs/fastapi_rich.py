from typing import List, Optional

import requests
from fastapi import (
    APIRouter,
    BackgroundTasks,
    Body,
    Cookie,
    Depends,
    FastAPI,
    File,
    Form,
    Header,
    HTTPException,
    Query,
    Request,
    Response,
    UploadFile,
)
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel, Field
from ray import serve

app = FastAPI(title="Shop", version="1.2")
app.add_middleware(CORSMiddleware, allow_origins=["http://example.com"])
router = APIRouter(prefix="/r")


class Item(BaseModel):
    name: str
    price: float = Field(gt=0)
    tags: List[str] = []


class Out(BaseModel):
    name: str


@app.middleware("http")
async def add_header(request: Request, call_next):
    response = await call_next(request)
    response.headers["x-mid"] = "yes"
    return response


def token(authorization: Optional[str] = Header(None)):
    if authorization != "Bearer t":
        raise HTTPException(401, "no token")
    return "t"


@router.get("/plain")
def plain():
    return ["router"]


app.include_router(router)


@app.get("/free/{x}")
def free(x: int):
    return x


@serve.deployment
@serve.ingress(app)
class Shop:
    def __init__(self, greeting):
        self.greeting = greeting
        self.log = []

    @app.post("/items", status_code=201, response_model=Out)
    def create(self, item: Item):
        self.log.append(item.name)
        return item

    @app.get("/secure")
    def secure(self, t: str = Depends(token)):
        return {"token": t, "greeting": self.greeting}

    @app.get("/list")
    def listing(self, q: List[int] = Query([])):
        return q

    @app.post("/form")
    def form(self, a: str = Form(), b: int = Form(2)):
        return {"a": a, "b": b}

    @app.post("/upload")
    async def upload(self, file: UploadFile = File()):
        data = await file.read()
        return {"name": file.filename, "size": len(data)}

    @app.get("/cookie")
    def cookie(self, response: Response, c: Optional[str] = Cookie(None)):
        response.set_cookie("seen", "1")
        return {"c": c}

    @app.get("/stream")
    def stream(self):
        return StreamingResponse((f"{i}," for i in range(5)), media_type="text/csv")

    @app.get("/background")
    def background(self, tasks: BackgroundTasks):
        tasks.add_task(self.log.append, "task")
        return "queued"

    @app.get("/log")
    def get_log(self):
        return self.log

    @app.delete("/items/{name}", status_code=204)
    def delete(self, name: str):
        return None


serve.run(Shop.bind("hi"), route_prefix="/shop")
base = "http://127.0.0.1:8000/shop"


def show(r):
    print(
        r.request.method,
        r.request.path_url,
        r.status_code,
        r.headers.get("content-type"),
        r.headers.get("x-mid"),
        r.text,
    )


show(requests.post(base + "/items", json={"name": "a", "price": 2}))
show(requests.post(base + "/items", json={"name": "a", "price": -2}))
show(requests.post(base + "/items", data="not json"))
show(requests.get(base + "/secure"))
show(requests.get(base + "/secure", headers={"Authorization": "Bearer t"}))
show(requests.get(base + "/list?q=1&q=2"))
show(requests.post(base + "/form", data={"a": "x"}))
r = requests.post(base + "/upload", files={"file": ("f.txt", b"12345")})
show(r)
r = requests.get(base + "/cookie", cookies={"c": "v"})
show(r)
print(r.headers["set-cookie"])
show(requests.get(base + "/stream"))
show(requests.get(base + "/background"))
show(requests.get(base + "/log"))
show(requests.delete(base + "/items/a"))
show(requests.get(base + "/r/plain"))
show(requests.get(base + "/free/7"))
r = requests.get(base + "/list", headers={"Origin": "http://example.com"})
print(r.headers.get("access-control-allow-origin"))
print(
    requests.get(base + "/openapi.json").json()["info"],
    sorted(requests.get(base + "/openapi.json").json()["paths"]),
)
print(requests.get(base + "/openapi.json").json().get("servers"))
