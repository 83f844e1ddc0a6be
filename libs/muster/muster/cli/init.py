"""`muster init`: a project to start from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from muster.cli.output import print_json, print_line
from muster.cli.queries import JsonOption
from muster.cli.session import get_session
from serve_common.errors import BadField

_APP: Final = '''\
"""An application of one deployment: it greets whoever calls it."""

import muster as serve


@serve.deployment
class Greeter:
    def __init__(self, greeting: str) -> None:
        # Load a model here: it runs once for each replica.
        self.greeting = greeting

    def greet(self, name: str) -> str:
        return f"{self.greeting}, {name}!"

    async def __call__(self, request) -> dict[str, str]:
        # A request of Starlette: query_params, headers, await request.json(), await request.body().
        return {"answer": self.greet(request.query_params.get("name", "world"))}


app = Greeter.bind("Hello")

if __name__ == "__main__":
    serve.run(app, blocking=True)
'''
_TEST: Final = '''\
"""Tests need no stack: deployments run within this process."""

import muster as serve

from app import app


def test_it_greets() -> None:
    handle = serve.run(app, _local_testing_mode=True)
    assert handle.greet.remote("Ada").result() == "Hello, Ada!"
'''
_README: Final = """\
# {name}

```sh
pip install -r requirements.txt
python app.py                               # until Ctrl-C; starts a stack of its own where it finds none
curl 'http://127.0.0.1:8000/?name=Ada'      # in another terminal
python -m pytest                            # needs no stack
```

`muster run app:app` runs it too, and with `--reload` again after each change of a file.

`app.py` has the model. What it imports from this directory goes along with it, except what `.musterignore` names.

With `muster up` in another terminal the stack stays when the program ends, and `muster status`, `muster logs` and
`muster doctor` look at it. `@serve.deployment(num_replicas=2)` runs two replicas,
`ray_actor_options={{"num_gpus": 1}}` gives each a GPU.
"""
_IGNORE: Final = """\
# Files that do not go along with the code, as in .gitignore.
.venv/
__pycache__/
.muster/
secrets/
tests/
*.log
"""
_REQUIREMENTS: Final = """\
muster[embedded]
pytest
"""


_FILES: Final = {
    "app.py": _APP,
    "test_app.py": _TEST,
    "README.md": _README,
    ".musterignore": _IGNORE,
    "requirements.txt": _REQUIREMENTS,
}


def init(
    context: typer.Context,
    *,
    directory: Annotated[
        str, typer.Argument(metavar="DIR", help="Directory of the project; created if missing.")
    ] = ".",
    as_json: JsonOption = False,
) -> None:
    """Write a project to start from: a model that answers, its test, and a README.

    Example:
      muster init demo && cd demo && python app.py

    An existing file is not replaced: then nothing is written.
    """
    session = get_session(context)
    with session.reporting(as_json=as_json):
        target = session.directory / directory
        there = [name for name in _FILES if (target / name).exists() or (target / name).is_symlink()]
        if there:
            raise BadField("DIR", f"{directory} has {', '.join(there)} already; nothing was written")
        _write(target)
        if as_json:
            print_json({"directory": str(target), "files": list(_FILES)})
            return
        print_line(f"{directory} has {', '.join(_FILES)}. Next:")
        enter = "" if directory == "." else f"cd {directory} && "
        print_line(f"  {enter}python app.py       # or: muster run app:app")
        print_line("  curl 'http://127.0.0.1:8000/?name=Ada'")


def _write(target: Path) -> None:
    written: list[Path] = []
    try:
        target.mkdir(parents=True, exist_ok=True)
        for name, text in _FILES.items():
            path = target / name
            with path.open("x", encoding="utf-8") as file:
                written.append(path)
                file.write(text.format(name=target.resolve().name) if name == "README.md" else text)
    except OSError as error:
        for path in written:
            path.unlink(missing_ok=True)
        raise BadField("DIR", f"{error.filename or target} cannot be written: {error.strerror}") from error
