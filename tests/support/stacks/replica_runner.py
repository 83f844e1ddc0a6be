"""Replicas in a process without Ray: takes a `StartReplicaRequest` on each line of input up to an empty one.

Lives as long as its input. What belongs to the process, such as the replica's context, is the last one's.
"""

from __future__ import annotations

import base64
import os
import sys

import msgspec

from serve_replica_host.replica.process import ReplicaProcess, StartReplicaRequest


class NoMetrics:
    """Counts nothing."""

    def __getattr__(self, _name):
        return lambda *_arguments: None


def main() -> None:
    held = []
    while line := sys.stdin.readline().strip():
        order = msgspec.msgpack.decode(base64.b64decode(line), type=StartReplicaRequest)
        held.append(ReplicaProcess(order, NoMetrics()))
        error = held[-1].start()
        if error is not None:
            sys.exit(error)
    print("ready", flush=True)
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main()
