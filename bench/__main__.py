"""``python -m bench [NAME ...]``: run benchmarks and print Markdown tables."""

from __future__ import annotations

import os
import platform
import sys

from bench import daemon, decision, hooks, memory, peers, placement, probe, real, scan, submit

ALL = {
    "daemon": daemon.run,
    "decision": decision.run,
    "submit": submit.run,
    "hooks": hooks.run,
    "scan": scan.run,
    "probe": probe.run,
    "memory": memory.run,
    "peers": peers.run,
    "placement": placement.run,
    "real": real.run,
}
#: Take a quarter of an hour and more, so they run when asked for by name.
LONG = {"placement", "real"}


def main() -> int:
    names = sys.argv[1:] or [name for name in ALL if name not in LONG]
    if unknown := [n for n in names if n not in ALL]:
        print(f"unknown benchmark {unknown[0]}; there are {', '.join(ALL)}", file=sys.stderr)
        return 2
    load = os.getloadavg()[0]
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"load average at the start {load:.1f}\n"
    )
    for name in names:
        ALL[name]()
    return 0


sys.exit(main())
