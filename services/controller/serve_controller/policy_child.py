"""Runs users' policy functions in a child process: one line of JSON per request, one per reply.

Why a process: user code may hang, print, crash or exhaust memory. Here it cannot affect the controller: its output
goes to stderr, its memory is bounded, and the parent kills it when it takes too long.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import os
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, Final

import msgspec

from serve_common.config.autoscaling import AutoscalingContext
from serve_common.protocol.reports import ERROR_LENGTH_MAX
from serve_common.runtime import guardian
from serve_common.runtime.policies import PolicyUnusable, check_policy, check_result
from serve_common.values import truncate_start

MEMORY_BYTES_MAX: Final = 512 * 1024 * 1024
"""Limit of the child's address space, bytes."""
_FILES_MAX: Final = 256


class PolicyRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line to the child."""

    function: str
    """``module:function``."""
    context: AutoscalingContext | None = None
    """None only imports the function."""
    kwargs: dict[str, Any] = {}


class PolicyReply(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line from the child; the first one only signals that it has started."""

    error: str = ""
    """The user's traceback, or why the function or its return value is invalid; empty for none."""
    is_stale: bool = False
    """Imported files have changed since: the request must be sent to a new process."""
    num_replicas: float = 0
    policy_state: dict[str, Any] | None = None


class _Functions:
    """Cache of functions by import path, with the modification times of the files they came from."""

    def __init__(self, app_dir: str) -> None:
        self._app_dir = app_dir
        self._found: dict[str, Callable[..., object]] = {}
        self._changed_at: dict[str, int] = {}

    def are_stale(self) -> bool:
        """Whether a file below the app_dir was changed after it was imported."""
        return any(_changed_at(path) != known for path, known in self._changed_at.items())

    def find(self, path: str) -> Callable[..., object]:
        found = self._found.get(path)
        if found is None:
            if self._app_dir and not Path(self._app_dir).is_dir():
                raise PolicyUnusable(
                    f"app_dir {self._app_dir} is not a directory that the controller can see"
                )
            found = self._found[path] = _import(path)
            self._note_files()
        return found

    def _note_files(self) -> None:
        if not self._app_dir:
            return
        for module in list(sys.modules.values()):
            file = getattr(module, "__file__", None)
            if file is not None and file.startswith(f"{self._app_dir}/") and file not in self._changed_at:
                self._changed_at[file] = _changed_at(file)


def handle(functions: _Functions, line: bytes) -> PolicyReply:
    """Handle one request line."""
    try:
        request = msgspec.json.decode(line, type=PolicyRequest)
        if functions.are_stale():
            return PolicyReply(is_stale=True)
        function = functions.find(request.function)
        if request.context is None:
            return PolicyReply()
        number, state = check_result(request.function, function(request.context, **request.kwargs))
        return PolicyReply(num_replicas=number, policy_state=state)
    except PolicyUnusable as error:
        return PolicyReply(error=str(error))
    except BaseException as error:  # noqa: BLE001 - SystemExit of the user's too is an answer
        return PolicyReply(error=_traceback(error))


def main(app_dir: str) -> int:
    """Serve requests until the parent closes the pipe."""
    with _moved_pipes() as (requests, replies):
        _limit_resources()
        if app_dir:
            sys.path.insert(0, app_dir)
            if Path(app_dir).is_dir():
                os.chdir(app_dir)
        functions = _Functions(app_dir)
        _send(replies, PolicyReply())
        for line in requests:
            reply = handle(functions, line)
            sys.stdout.flush()
            _send(replies, reply)
    return 0


def _import(path: str) -> Callable[..., object]:
    module_name, _, attribute = path.partition(":")
    found: Any = importlib.import_module(module_name)
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise PolicyUnusable(
                f"{module_name} ({getattr(found, '__file__', 'built in')}) has no {attribute}"
            )
        found = getattr(found, part)
    function: Callable[..., object] = check_policy(found, path)
    return function


def _traceback(error: BaseException) -> str:
    """Format the traceback from the user's first frame on; a long one loses its beginning."""
    summary = traceback.TracebackException.from_exception(error, limit=-50)
    ours = (__file__, "<frozen ", str(Path(importlib.__file__).parent))
    summary.stack = traceback.StackSummary.from_list(
        [frame for frame in summary.stack if not frame.filename.startswith(ours)]
    )
    text = "".join(summary.format()).rstrip()
    return truncate_start(text, ERROR_LENGTH_MAX)


def _changed_at(path: str) -> int:
    try:
        return Path(path).stat().st_mtime_ns
    except OSError:
        return 0


def _send(replies: IO[bytes], reply: PolicyReply) -> None:
    replies.write(msgspec.json.encode(reply) + b"\n")


@contextlib.contextmanager
def _moved_pipes() -> Any:
    """Move the pipes to the parent to file descriptors that ``print`` and ``input`` do not use."""
    with os.fdopen(os.dup(0), "rb") as requests, os.fdopen(os.dup(1), "wb", buffering=0) as replies:
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        os.dup2(2, 1)
        yield requests, replies


def _limit_resources() -> None:
    faulthandler.register(signal.SIGUSR1, all_threads=False)  # lets the parent find out where it hangs
    for what, limit in (
        (resource.RLIMIT_AS, MEMORY_BYTES_MAX),
        (resource.RLIMIT_NOFILE, _FILES_MAX),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(what)
        bound = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(what, (bound, bound))
    # Also when it hangs, it must not outlive the controller.
    guardian.prctl(guardian.PR_SET_PDEATHSIG, int(signal.SIGKILL))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
