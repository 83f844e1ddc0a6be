import asyncio
import json
from fastapi import FastAPI, WebSocket, WebSocketDisconnect
from ray import serve
import websockets
from websockets.sync.client import connect

app = FastAPI()


@serve.deployment
@serve.ingress(app)
class EchoServer:
    @app.websocket("/")
    async def echo(self, ws: WebSocket):
        await ws.accept()
        try:
            while True:
                text = await ws.receive_text()
                if text == "bye":
                    await ws.close(code=4000, reason="left")
                    return
                await ws.send_text(text)
        except WebSocketDisconnect:
            print("Client disconnected.")

    @app.websocket("/json/{room}")
    async def json(self, ws: WebSocket, room: str):
        await ws.accept(subprotocol="chat")
        data = await ws.receive_json()
        await ws.send_json({"room": room, "got": data, "path": ws.url.path, "q": ws.query_params.get("q")})
        await ws.send_bytes(b"\x00\x01")
        await ws.close()

    @app.websocket("/reject")
    async def reject(self, ws: WebSocket):
        await ws.close()


serve.run(EchoServer.bind())
with connect("ws://localhost:8000") as websocket:
    websocket.send("Eureka!")
    print(websocket.recv())
    websocket.send("x" * 100000)
    print(len(websocket.recv()))
    websocket.send("bye")
    try:
        websocket.recv()
    except websockets.exceptions.ConnectionClosed as e:
        print(e.rcvd.code, e.rcvd.reason)
with connect("ws://localhost:8000/json/a?q=1", subprotocols=["chat"]) as ws:
    ws.send(json.dumps({"x": 1}))
    print(ws.subprotocol, ws.recv(), ws.recv())
try:
    connect("ws://localhost:8000/reject")
except websockets.exceptions.InvalidStatus as e:
    print(e.response.status_code)
try:
    connect("ws://localhost:8000/missing")
except websockets.exceptions.InvalidStatus as e:
    print(e.response.status_code)
