"""Runs between a parent and one process that it starts, so that nothing of that process ever outlives it.

The embedded stack's supervisor has one for each of its processes, and a replica host one for its Ray runtime.

Why a process of its own: only a parent is notified at once that a process died, and only a "subreaper" inherits what
a dead process leaves behind (Ray's raylet, workers and agents; Postgres' backends). With one guardian for each process
it is certain whose leftovers they are, however they rename themselves, and the cleaning happens also when the
parent itself is killed with ``kill -9``: the kernel then signals the guardian (PR_SET_PDEATHSIG). It does not when the
parent is another user without the right to signal the guardian's; the guarded process must then detect by itself that
it was orphaned.

Run as a file by ``python -I -S`` with nothing but the standard library, so that it starts in about 20 ms.
The signals it obeys: SIGTERM, SIGINT, SIGHUP: stop in order; SIGQUIT: kill everything now.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
_STOP_SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
_HANDLED_SIGNALS = {*_STOP_SIGNALS, signal.SIGQUIT, signal.SIGCHLD}
_LEFTOVERS_DEADLINE_S = 3.0


def prctl(option: int, value: int) -> None:
    """Call prctl; does nothing where it does not exist (the guarantees then depend on orderly stops)."""
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


def command(
    argv: Sequence[str],
    *,
    report_fd: int | None = None,
    stop_signal: int = signal.SIGTERM,
    stop_timeout_s: float = 5.0,
) -> list[str]:
    """The command line that runs ``argv`` under a guardian whose parent is this process.

    The pid of ``argv`` is written to ``report_fd`` as a line. Told to stop, the guardian sends ``stop_signal``, and
    SIGKILL after ``stop_timeout_s`` seconds. Start it on a thread that lives as long as this process: the kernel
    signals the guardian when the thread that started it ends.
    """
    return [
        *(sys.executable, "-I", "-S", __file__),
        *("--parent", str(os.getpid())),
        *(() if report_fd is None else ("--report-fd", str(report_fd))),
        *("--stop-signal", str(int(stop_signal)), "--stop-timeout-s", str(stop_timeout_s), "--"),
        *argv,
    ]


def get_exit_code(status: int) -> int:
    """The exit code of a wait status as a shell reports it: the code, or 128 + signal."""
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def start(argv: list[str], stop_signal: int) -> int:
    """Start the guarded process and return its pid. It exits with 127 when it cannot be executed."""
    guardian = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDLED_SIGNALS)
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        prctl(PR_SET_PDEATHSIG, stop_signal)
        if os.getppid() == guardian:
            os.execvp(argv[0], argv)  # noqa: S606 - no shell is wanted
    except OSError as error:
        os.write(2, f"{argv[0]} cannot be executed: {error.strerror}\n".encode())
    finally:
        os._exit(127)


def reap(main_pid: int) -> int | None:
    """Reap every child that ended; return the status of the main one when it is among them."""
    status = None
    while True:
        try:
            pid, ended = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return status
        if pid == 0:
            return status
        if pid == main_pid:
            status = ended


def children() -> list[int]:
    """Pids of our children. They are safe to signal: none can be reused before we have reaped it."""
    own = os.getpid()
    found = []
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name in parentheses may hold anything, so what follows the last one counts: state, parent, …
            parent = int(entry.read_text(errors="replace").rpartition(")")[2].split()[1])
        except (OSError, IndexError, ValueError):
            continue  # it ended meanwhile
        if parent == own:
            found.append(int(entry.parent.name))
    return found


def kill_leftovers() -> None:
    """Kill all processes left behind by the main one. Their children become ours, so repeat until none is left."""
    deadline = time.monotonic() + _LEFTOVERS_DEADLINE_S
    while time.monotonic() < deadline:
        for pid in children():
            _send(pid, signal.SIGKILL)
        try:
            if os.waitpid(-1, os.WNOHANG) == (0, 0):
                signal.sigtimedwait({signal.SIGCHLD}, 0.02)
        except ChildProcessError:
            return


def _send(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass  # it ended by itself
    except PermissionError as error:
        os.write(2, f"process {pid} cannot be signalled: {error.strerror}\n".encode())


def guard(main_pid: int, stop_signal: int, stop_timeout_s: float) -> int:
    """Wait until the main process ends, by itself or because a signal asked to stop it; return its exit code."""
    kill_at: float | None = None
    while True:
        wait_s = 3600.0 if kill_at is None else max(0.0, kill_at - time.monotonic())
        received = signal.sigtimedwait(_HANDLED_SIGNALS, wait_s)
        status = reap(main_pid)
        if status is not None:
            return get_exit_code(status)
        if received is not None and received.si_signo in _STOP_SIGNALS and kill_at is None:
            _send(main_pid, stop_signal)
            kill_at = time.monotonic() + stop_timeout_s
        elif (received is not None and received.si_signo == signal.SIGQUIT) or (
            kill_at is not None and time.monotonic() >= kill_at
        ):
            _send(main_pid, signal.SIGKILL)
            kill_at = time.monotonic() + stop_timeout_s


def main() -> int:
    """Guard one process, configured by the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parent", type=int, required=True, help="pid of the process that starts this one")
    parser.add_argument("--report-fd", type=int, help="where the process' pid is written")
    parser.add_argument("--stop-signal", type=int, default=int(signal.SIGTERM))
    parser.add_argument("--stop-timeout-s", type=float, default=5.0)
    parser.add_argument("argv", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    argv = options.argv[1:] if options.argv[:1] == ["--"] else options.argv
    signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED_SIGNALS)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    prctl(PR_SET_PDEATHSIG, int(signal.SIGTERM))
    if os.getppid() != options.parent:
        return 0  # the parent died before PR_SET_PDEATHSIG was set
    if options.report_fd is not None:
        os.set_inheritable(options.report_fd, False)  # noqa: FBT003 - positional only
    pid = start(argv, options.stop_signal)
    if options.report_fd is not None:
        os.write(options.report_fd, f"{pid}\n".encode())
        os.close(options.report_fd)
    code = guard(pid, options.stop_signal, options.stop_timeout_s)
    kill_leftovers()
    return code


if __name__ == "__main__":
    sys.exit(main())
