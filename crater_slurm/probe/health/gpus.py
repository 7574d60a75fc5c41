"""How the GPUs are, asked of a child with a deadline: a call into a wedged driver never returns.

A child that hangs is left to the kernel and a new one started some time later, so that a dead
driver costs one process a while and never the probe.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from crater_slurm.model.health import GpuHealth
from crater_slurm.model.profile import NodeProfile

_DEADLINE_SECONDS = 10.0
_RETRY_SECONDS = 300.0
_LONGEST_ANSWER = 1 << 20
_COMMAND = (sys.executable, "-m", "crater_slurm.probe.health.nvml_watch")


@dataclass(slots=True)
class GpuSampler:
    """Owns the child. ``problem`` says why nothing is known; empty when there are no GPUs."""

    command: Sequence[str] = _COMMAND
    deadline_seconds: float = _DEADLINE_SECONDS
    problem: str = ""
    _child: subprocess.Popen[bytes] | None = None
    _not_before: float = 0.0

    def sample(self, profile: NodeProfile) -> tuple[GpuHealth, ...]:
        """Each GPU of the profile; one that the driver does not name has nothing but its index."""
        if not profile.gpus:
            return ()
        states = self.ask()
        by_uuid = {state.get("uuid"): state for state in states}
        found = []
        for gpu in profile.gpus:
            state = dict(by_uuid.get(gpu.uuid, {})) if gpu.uuid else {}
            state.pop("uuid", None)
            throttled = tuple(map(str, state.pop("throttled", ())))
            known = {name: value for name, value in state.items() if name in _NUMBERS}
            found.append(
                GpuHealth(
                    index=gpu.index, uuid=gpu.uuid, model=gpu.model, throttled=throttled, **known
                )
            )
        return tuple(found)

    def close(self) -> None:
        """End the child."""
        if self._child is not None:
            with contextlib.suppress(OSError):
                os.killpg(self._child.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(0.5)
            for stream in (self._child.stdin, self._child.stdout):
                with contextlib.suppress(OSError):
                    if stream:
                        stream.close()
            self._child = None

    def ask(self) -> list[dict[str, Any]]:
        """What the child says of each GPU; nothing, with ``problem`` set, when it fails."""
        if time.monotonic() < self._not_before:
            return []
        try:
            answer = self._exchange()
            states = answer["gpus"]
            self.problem = ""
            return [state for state in states if isinstance(state, dict)]
        except (OSError, ValueError, KeyError, TypeError) as error:
            self.problem = f"the GPUs' health is unknown: {error}"
            self._not_before = time.monotonic() + _RETRY_SECONDS
            self.close()
            return []

    def _exchange(self) -> dict[str, Any]:
        if self._child is None:
            self._child = self._start()
        child = self._child
        assert child.stdin
        assert child.stdout
        with contextlib.suppress(BrokenPipeError):  # it has said why before it ended
            child.stdin.write(b"\n")
            child.stdin.flush()
        line = _read_line(child.stdout.fileno(), time.monotonic() + self.deadline_seconds)
        answer = json.loads(line)
        if not isinstance(answer, dict):
            raise ValueError("the child printed no object")
        if "error" in answer:
            raise ValueError(str(answer["error"]))
        return answer

    def _start(self) -> subprocess.Popen[bytes]:
        package = str(Path(__file__).parents[3])
        search = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
        return subprocess.Popen(
            self.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": search},
            start_new_session=True,
        )


_NUMBERS = {
    *("temperature_c", "ecc_uncorrected", "ecc_corrected", "memory_used_mib", "memory_total_mib"),
    *("utilization_percent", "memory_utilization_percent", "power_w"),
}


def _read_line(fd: int, deadline: float) -> bytes:
    """One line. Raises TimeoutError (an OSError), or ValueError when the other side is gone."""
    line = b""
    with selectors.DefaultSelector() as selector:
        selector.register(fd, selectors.EVENT_READ)
        while not line.endswith(b"\n"):
            if not selector.select(max(0.0, deadline - time.monotonic())):
                raise TimeoutError("the driver did not answer in time")
            chunk = os.read(fd, 65536)
            line += chunk
            if not chunk or len(line) > _LONGEST_ANSWER:
                break
    if not line.endswith(b"\n"):
        raise ValueError("the child that asks the driver ended")
    return line
