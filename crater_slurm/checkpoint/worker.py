"""A checkpoint worker's process: takes its job's spec, gives up root, and works.

Started by crater-io-daemon as root with its listening socket as descriptor 3. Everything that it
may need is imported before the rights go: the user may not be able to read the code. It refuses
to run as root for another user's job, and to leave its memory to a debugger or a core file.
"""

from __future__ import annotations

import os
import select
import socket
import sys
import traceback
from collections.abc import Callable

from crater_slurm.checkpoint import control, remote, syscalls
from crater_slurm.checkpoint.loop import MakeServices, Worker
from crater_slurm.checkpoint.onward import Onward
from crater_slurm.checkpoint.peers import verbs
from crater_slurm.checkpoint.peers.lost import LostNode
from crater_slurm.checkpoint.peers.services import WithCopies
from crater_slurm.checkpoint.rate import TokenBucket
from crater_slurm.checkpoint.services import Services
from crater_slurm.checkpoint.spec import Spec
from crater_slurm.checkpoint.threads import Log
from crater_slurm.job.wire import Channel, WireError

LISTENER_FD = 3
#: Who starts a worker connects at once; without anybody it is of no use.
_CONNECT_S = 30.0
#: Registered memory of all connections with other nodes, at most.
_RDMA_BYTES = 4 << 30


def default_services(
    spec: Spec, changed: Callable[[], None], log: Log, rate: TokenBucket
) -> Services:
    """What a job has beyond its node's cache: rules of keeping, a destination and staged data,
    where it asked, and copies on its other nodes, where the site has them."""
    onward = Onward(spec, changed, log, rate)
    if not spec.token:
        return onward
    return WithCopies(spec, onward, changed, log, lambda lost: LostNode(lost, changed, log, rate))


def main(make: MakeServices = default_services) -> int:
    """Run until the job is over and all is done; the process's exit status."""
    code = 1
    try:
        with socket.socket(fileno=LISTENER_FD) as listener:
            listener.set_inheritable(False)
            code = _run(listener, make)
    except (OSError, WireError, ValueError, TypeError, KeyError) as error:
        print(f"checkpoint worker: couldn't start: {error}", file=sys.stderr, flush=True)
    except Exception:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(code)  # not held up by a thread that waits for a disk


def _run(listener: socket.socket, make: MakeServices) -> int:
    syscalls.keep_secrets()
    found = _first(listener)
    if found is None:
        print("checkpoint worker: nobody has connected", file=sys.stderr, flush=True)
        return 1
    connection, spec = found
    for url in (spec.remote.url, *spec.stage):
        remote.preload(url)
    if spec.transport.startswith("rdma"):
        syscalls.may_lock(_RDMA_BYTES)
        verbs.preload()
    syscalls.become(spec.user, spec.uid, spec.gid)
    syscalls.keep_secrets()
    Worker(spec, listener, connection, make).run()
    return 0


def _first(listener: socket.socket) -> tuple[socket.socket, Spec] | None:
    """The daemon's first connection and the spec that it sends; None when nobody comes."""
    while select.select([listener], [], [], _CONNECT_S)[0]:
        connection, _ = listener.accept()
        if not control.trusted(connection):
            connection.close()
            continue
        connection.settimeout(_CONNECT_S)
        try:
            message, fds = Channel(connection).receive()
        except (WireError, OSError):
            connection.close()
            continue
        for fd in fds:
            os.close(fd)
        if message["op"] != "spec" or not isinstance(message.get("spec"), str):
            raise WireError(f"begin with {message['op']!r:.40} instead of a spec")
        return connection, Spec.from_json(str(message["spec"]))
    return None


if __name__ == "__main__":
    sys.exit(main())
