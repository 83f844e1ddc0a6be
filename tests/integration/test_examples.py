"""The examples as a user runs them, all on one stack: they deploy, and their answers are right."""

from __future__ import annotations

import asyncio
import json
import sys
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio
import websockets

from muster.embedded import EmbeddedStack
from tests.support.documents import page
from tests.support.paths import ROOT
from tests.support.programs import run_beside
from tests.support.servers.reserved_port import ANY_PORTS

pytestmark = [pytest.mark.timeout(400), pytest.mark.asyncio(loop_scope="module")]


class Examples:
    """A stack, and a shell in the checkout."""

    def __init__(self, state_dir: str, url: str) -> None:
        self.url = url
        self._state_dir = state_dir

    async def shell(self, *words: str) -> str:
        """What a program prints that succeeds."""
        return await run_beside(self._state_dir, sys.executable, *words)

    async def ask(self, path: str, body: bytes | None = None, **headers: str) -> tuple[int, Any]:
        """The status and the JSON of a response."""

        def call() -> tuple[int, Any]:
            request = urllib.request.Request(self.url + path, body, headers)
            try:
                with urllib.request.urlopen(request, timeout=60) as response:
                    return response.status, json.loads(response.read())
            except urllib.error.HTTPError as error:
                with error:
                    return error.code, json.loads(error.read())

        return await asyncio.to_thread(call)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def examples(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Examples]:
    async with EmbeddedStack(tmp_path_factory.mktemp("examples") / "state", ANY_PORTS) as stack:
        yield Examples(stack.record.state_dir, stack.record.http_url)


async def test_a_text_goes_through_both_deployments(examples: Examples) -> None:
    await examples.shell("examples/text_pipeline.py")
    found = await examples.ask("/pipeline", b"The cat and the dog. A cat, a dog, the bird; cat!")
    assert found == (200, {"cat": 3, "dog": 2, "bird": 1})


async def test_a_wrong_body_is_refused_by_the_name_of_its_field(examples: Examples) -> None:
    await examples.shell("examples/fastapi_validation.py")
    headers = {"Content-Type": "application/json"}
    body = b'{"area_m2": 70, "rooms": 3}'
    assert await examples.ask("/rent/predict", body, **headers) == (200, {"rent": 925.0})
    status, problem = await examples.ask("/rent/predict", body.replace(b"3", b"0"), **headers)
    assert status == 422
    assert [each["loc"] for each in problem["detail"]] == [["body", "rooms"]]


async def test_the_openai_client_gets_tokens_as_they_are_made(examples: Examples) -> None:
    await examples.shell("examples/token_stream.py")
    message: Any = {"role": "user", "content": "to be or not to be"}
    async with openai.AsyncOpenAI(base_url=f"{examples.url}/llm/v1", api_key="none", max_retries=0) as client:
        whole = await client.chat.completions.create(model="parrot", messages=[message])
        assert whole.choices[0].message.content == "TO BE OR NOT TO BE"
        stream = await client.chat.completions.create(model="parrot", messages=[message], stream=True)
        choices = [chunk.choices[0] async for chunk in stream]
        assert [c.delta.content for c in choices if c.delta.content] == [
            "TO ",
            "BE ",
            "OR ",
            "NOT ",
            "TO ",
            "BE",
        ]
        assert choices[-1].finish_reason == "stop"
        with pytest.raises(openai.UnprocessableEntityError):
            await client.chat.completions.create(model="parrot", messages=[])


async def test_what_one_says_in_the_room_all_read(examples: Examples) -> None:
    await examples.shell("examples/websocket_chat.py")
    room = examples.url.replace("http", "ws", 1) + "/chat"
    async with asyncio.timeout(60), websockets.connect(f"{room}/ada") as ada:
        assert await ada.recv() == "ada came in"
        async with websockets.connect(f"{room}/bob") as bob:
            assert [await ada.recv(), await bob.recv()] == ["bob came in"] * 2
            await bob.send("hello")
            assert [await ada.recv(), await bob.recv()] == ["bob: hello"] * 2
        assert await ada.recv() == "bob left"
        async with websockets.connect(f"{room}/ada") as second:
            with pytest.raises(websockets.ConnectionClosed) as closed:
                await second.recv()
            assert closed.value.rcvd is not None
            assert closed.value.rcvd.code == 1008


async def test_batches_are_formed_and_their_gain_is_printed(examples: Examples) -> None:
    printed = await examples.shell("examples/batching.py", examples.url)
    first, second = printed.splitlines()
    assert int(first.partition("batches of up to ")[2].partition(":")[0]) > 1, printed
    assert second.startswith("gain: "), printed
    assert (await examples.ask("/batching?batched=yes&n=10"))[1]["sum"] == 45


async def test_twenty_models_answer_and_stay_where_they_were_loaded(examples: Examples) -> None:
    await examples.shell("examples/many_models.py")
    names = [f"city-{number}" for number in range(20)]
    for _ in range(3):
        for number, name in enumerate(names):
            status, found = await examples.ask("/models?x=3", serve_multiplexed_model_id=name)
            assert (status, found["model"], found["y"]) == (200, name, number * 3)
    status, problem = await examples.ask("/models", serve_multiplexed_model_id="atlantis")
    assert (status, problem) == (404, {"error": "there is no model 'atlantis'"})


async def test_users_keep_their_version_and_a_shadow_gets_copies(examples: Examples) -> None:
    canary, sticky = (
        [command.words[1:] for command in block.commands() if command.words[0] == "muster"]
        for block in page("examples/README.md").blocks("sh")
        if "greeter" in block.text
    )
    for words in canary:
        await examples.shell("-m", "muster.cli.main", *words)
    texts = {(await examples.ask("/greeter"))[1]["text"] for _ in range(5)}
    assert texts == {"Hello"}
    for words in sticky:
        await examples.shell("-m", "muster.cli.main", *words)
    versions: dict[str, str] = {}
    calls = {"Hello": 0, "Good day": 0}
    for _ in range(3):
        for number in range(40):
            user = f"user-{number}"
            found = (await examples.ask("/greeter", **{"X-User": user}))[1]
            assert versions.setdefault(user, found["text"]) == found["text"]
            calls[found["text"]] = max(calls[found["text"]], found["calls"])
    served = list(versions.values())
    assert served.count("Hello") > served.count("Good day") > 0
    assert calls["Good day"] > 3 * served.count("Good day"), "the shadow had copies before"


async def test_every_example_is_in_the_index() -> None:
    linked = {Path(link).name for link in page("examples/README.md").links()}
    assert {file.name for file in (ROOT / "examples").glob("*.py")} <= linked
