"""Runs a tool for its output, with a deadline that holds even when the tool can't be killed.

A wedged driver leaves nvidia-smi in uninterruptible sleep, where no signal reaches it; such a
process is left behind for the kernel to end, and the caller goes on. Nothing is raised for what
the machine does: the caller gets what was printed, and a sentence when something was wrong.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO

#: More than any tool prints of one machine; a tool that prints more is stopped.
MAX_OUTPUT_BYTES = 16 * 2**20
#: Where admin tools live; a service's PATH often lacks these.
_SBIN = ("/usr/local/sbin", "/usr/sbin", "/sbin")
_DENIED = ("permission denied", "operation not permitted", "must be root", "superuser", "as root")
_CHUNK_BYTES = 65536
_REAP_S = 0.5


@dataclass(frozen=True, slots=True)
class Output:
    """What a tool printed; ``problem`` is a sentence when it did not end well, else None."""

    text: str = ""
    problem: str | None = None


def run(argv: Sequence[str], *, timeout_s: float = 20.0) -> Output:
    """Output of a program, in the C locale and without input."""
    name = os.path.basename(argv[0])  # noqa: PTH119
    path = os.pathsep.join((os.environ.get("PATH", os.defpath), *_SBIN))
    program = shutil.which(argv[0], path=path)
    if program is None:
        return Output(problem=f"{name} is not installed")
    try:
        process = subprocess.Popen(
            [program, *argv[1:]],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PATH": path, "LC_ALL": "C"},
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        return Output(problem=f"{name} can't be run: {error}")
    out, err, reason = _collect(process, time.monotonic() + timeout_s)
    if reason is not None:
        _abandon(process)
        much = f"printed more than {MAX_OUTPUT_BYTES // 2**20} MiB"
        told = f"took longer than {timeout_s:g} s" if reason == "time" else much
        return Output(out, f"{name} {told}")
    return Output(out, _failure(name, process.returncode, out, err))


def _collect(process: subprocess.Popen[bytes], deadline: float) -> tuple[str, str, str | None]:
    """stdout, stderr, and why reading ended early: ``time``, ``size`` or None."""
    assert process.stdout is not None
    assert process.stderr is not None
    parts: dict[IO[bytes], bytearray] = {process.stdout: bytearray(), process.stderr: bytearray()}
    reason: str | None = None
    with selectors.DefaultSelector() as selector:
        for stream in parts:
            selector.register(stream, selectors.EVENT_READ)
        while selector.get_map() and reason is None:
            for key, _ in selector.select(max(0.0, deadline - time.monotonic())):
                stream = key.fileobj  # type: ignore[assignment]
                chunk = os.read(key.fd, _CHUNK_BYTES)
                parts[stream] += chunk
                if not chunk:
                    selector.unregister(stream)
            if sum(map(len, parts.values())) > MAX_OUTPUT_BYTES:
                reason = "size"
            elif time.monotonic() >= deadline and selector.get_map():
                reason = "time"
    if reason is None:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            reason = "time"
    for stream in parts:
        stream.close()
    out, err = (bytes(part[:MAX_OUTPUT_BYTES]).decode(errors="replace") for part in parts.values())
    return out, err, reason


def _abandon(process: subprocess.Popen[bytes]) -> None:
    """Kills the tool and what it started; one in uninterruptible sleep is not waited for."""
    with contextlib.suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_REAP_S)


def _failure(name: str, status: int, out: str, err: str) -> str | None:
    if status == 0:
        return None
    lines = [line.strip() for line in (err or out).splitlines() if line.strip()]
    last = lines[-1][:200] if lines else "it printed nothing"
    if os.geteuid() != 0 and any(word in (out + err).lower() for word in _DENIED):
        return f"{name} needs root: {last}"
    how = f"was ended by signal {-status}" if status < 0 else f"failed with exit status {status}"
    return f"{name} {how}: {last}"
