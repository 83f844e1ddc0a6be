"""Executes a program as an unprivileged user, keeping what it needs to reach its files.

Why: Postgres refuses to run as root, but many containers and rented machines are used as root; the checkout may be in
a directory (/root, mode 700) that no other user can enter, and we must not change users and modes of the machine. Two
ways, either of which may be forbidden where the other is allowed:

``capability``: become `nobody`, keeping only the right to pass directories (CAP_DAC_READ_SEARCH, or CAP_DAC_OVERRIDE
where a container has no other). The data directory must belong to `nobody`.
``namespace``: stay the same user outside and be `nobody` inside a new user namespace. Files keep their owner.

Run as a file by ``python -I -S`` with nothing but the standard library.
"""

from __future__ import annotations

import ctypes
import os
import pwd
import struct
import sys
from pathlib import Path

PR_SET_PDEATHSIG, PR_GET_PDEATHSIG = 1, 2
PR_SET_KEEPCAPS, PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE = 8, 47, 2
CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH = 1, 2
CAPABILITY_VERSION_3 = 0x20080522
CLONE_NEWUSER = 0x10000000

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def become_nobody_with_capability(uid: int, gid: int) -> None:
    """Change the user, keep one capability, and let programs that we execute inherit it."""
    header = struct.pack("Ii", CAPABILITY_VERSION_3, 0)
    current = ctypes.create_string_buffer(24)
    _check(_libc.capget(ctypes.create_string_buffer(header), current), "capget")
    permitted = struct.unpack("IIIIII", current.raw)[1]
    retained = next((bit for bit in (CAP_DAC_READ_SEARCH, CAP_DAC_OVERRIDE) if permitted & (1 << bit)), None)
    _check(_libc.prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0), "PR_SET_KEEPCAPS")
    os.setgroups([])
    os.setresgid(gid, gid, gid)
    os.setresuid(uid, uid, uid)
    bits = 0 if retained is None else 1 << retained
    wanted = struct.pack("IIIIII", bits, bits, bits, 0, 0, 0)
    _check(_libc.capset(ctypes.create_string_buffer(header), ctypes.create_string_buffer(wanted)), "capset")
    if retained is not None:
        _check(_libc.prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, retained, 0, 0), "PR_CAP_AMBIENT_RAISE")


def become_nobody_in_namespace(uid: int, gid: int) -> None:
    """Become `nobody` within a new user namespace; outside of it the user stays the same."""
    outer_uid, outer_gid = os.geteuid(), os.getegid()
    _check(_libc.unshare(CLONE_NEWUSER), "unshare")
    own = Path("/proc/self")
    (own / "setgroups").write_text("deny")
    (own / "uid_map").write_text(f"{uid} {outer_uid} 1")
    (own / "gid_map").write_text(f"{gid} {outer_gid} 1")


def main(argv: list[str]) -> None:
    """``demote.py (capability|namespace) program argument…``; exits with 126 when the way is forbidden here."""
    way, program = argv[1], argv[2:]
    nobody = pwd.getpwnam("nobody")
    # A change of user clears the signal that is sent when the parent dies.
    death_signal = ctypes.c_int()
    _check(_libc.prctl(PR_GET_PDEATHSIG, ctypes.byref(death_signal), 0, 0, 0), "PR_GET_PDEATHSIG")
    parent = os.getppid()
    try:
        if way == "capability":
            become_nobody_with_capability(nobody.pw_uid, nobody.pw_gid)
        else:
            become_nobody_in_namespace(nobody.pw_uid, nobody.pw_gid)
        _check(_libc.prctl(PR_SET_PDEATHSIG, death_signal.value, 0, 0, 0), "PR_SET_PDEATHSIG")
        if death_signal.value and os.getppid() != parent:
            sys.exit(126)
        os.execv(program[0], program)  # noqa: S606 - no shell is wanted
    except OSError as error:
        sys.stderr.write(f"{program[0]} cannot be executed as nobody ({way}): {error}\n")
        sys.exit(126)


if __name__ == "__main__":
    main(sys.argv)
