"""Lets Slurm read a script without submitting it; filter and crater-scheduler see it too."""

from __future__ import annotations

import os
import re
import secrets
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from crater_slurm.errors import SlurmError
from crater_slurm.slurm.environment import clean_environment

if TYPE_CHECKING:
    from crater_slurm.slurm.client import Client

_TIMEOUT_SECONDS = 60


@dataclass(frozen=True, slots=True)
class TestOnly:
    """What sbatch said, line by line; ``nonce`` is how crater-scheduler knows the decision."""

    __test__ = False  # its name is sbatch's, pytest need not look at it

    nonce: str
    failed: bool
    said: tuple[str, ...]


def run(
    client: Client,
    script: Path,
    options: Sequence[str],
    environment: Mapping[str, str] | None = None,
) -> TestOnly:
    """``sbatch --test-only``. Raises SlurmError when there is no answer at all."""
    nonce = f"check-{secrets.token_hex(8)}"
    program = str(client.bin_dir / "sbatch") if client.bin_dir else "sbatch"
    variables = clean_environment(os.environ) | {"CRATER_CHECK": nonce} | dict(environment or {})
    if client.conf:
        variables["SLURM_CONF"] = str(client.conf)
    try:
        done = subprocess.run(
            [program, "--test-only", *options, str(script)],
            capture_output=True,
            text=True,
            errors="replace",
            env=variables,
            timeout=_TIMEOUT_SECONDS,
            stdin=subprocess.DEVNULL,
        )
    except FileNotFoundError as error:
        raise SlurmError(f"{program!r} is not there; install Slurm's client commands") from error
    except subprocess.TimeoutExpired as error:
        raise SlurmError("sbatch --test-only did not answer; is slurmctld up?") from error
    said = tuple(re.sub(r"^sbatch: (error: )?", "", line) for line in done.stderr.splitlines())
    return TestOnly(nonce, bool(done.returncode), said)
