"""hwloc's ``*.test`` files: which machine, which expected output, how lstopo is called."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Case:
    """A ``*.test`` file: the tarball, the expected output, lstopo's options, the environment."""

    path: Path
    source: Path
    target: Path
    options: tuple[str, ...]
    env: dict[str, str]


def read_case(path: Path) -> Case:
    found: dict[str, list[str]] = {}
    for line in path.read_text().splitlines():
        if match := re.match(r"(source|target|options|env):\s*(.*)", line):
            found.setdefault(match[1], []).append(match[2])
    env = {}
    for line in found.get("env", ()):
        if match := re.match(r"(?:export\s+)?(\w+)=(.*)", line):
            env[match[1]] = match[2].strip("\"'")
    return Case(
        path,
        path.parent / found["source"][0].strip(),
        path.parent / found["target"][0].strip(),
        tuple(shlex.split(" ".join(found.get("options", ())))),
        env,
    )
