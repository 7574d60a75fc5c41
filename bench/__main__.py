"""``python -m bench [NAME ...]``: run benchmarks and print Markdown tables."""

from __future__ import annotations

import os
import platform
import sys

from bench import (
    daemon,
    decision,
    following,
    hooks,
    memory,
    peers,
    placement,
    probe,
    real,
    scan,
    submissions,
    submit,
)

ALL = {
    "daemon": daemon.run,
    "decision": decision.run,
    "submit": submit.run,
    "submissions": submissions.run,
    "following": following.run,
    "hooks": hooks.run,
    "scan": scan.run,
    "probe": probe.run,
    "memory": memory.run,
    "peers": peers.run,
    "placement": placement.run,
    "real": real.run,
}
#: Take a quarter of an hour and more, so they run when asked for by name.
LONG = {"placement", "real", "submissions", "following"}
#: Take options of their own.
WITH_OPTIONS = {"submissions", "following"}


def main() -> int:
    # Options belong to the one benchmark that is named before them.
    words = sys.argv[1:]
    cut = next((i for i, word in enumerate(words) if word.startswith("-")), len(words))
    options = words[cut:]
    if options and (cut != 1 or words[0] not in WITH_OPTIONS):
        print(f"options go behind one of {', '.join(sorted(WITH_OPTIONS))}", file=sys.stderr)
        return 2
    names = words[:cut] or [name for name in ALL if name not in LONG]
    if unknown := [n for n in names if n not in ALL]:
        print(f"unknown benchmark {unknown[0]}; there are {', '.join(ALL)}", file=sys.stderr)
        return 2
    load = os.getloadavg()[0]
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"load average at the start {load:.1f}\n"
    )
    for name in names:
        ALL[name](options) if options else ALL[name]()  # type: ignore[operator]
    return 0


sys.exit(main())
