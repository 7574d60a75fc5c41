"""``crater-submit``: sbatch without the variables of the job it may be called from.

A platform often submits from inside a job or a step; the SLURM_ and SBATCH_ variables found
there would act as options of the new job (cores, binding, tasks). Everything else is sbatch's own:
options, output, exit code.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

#: Says where Slurm is, not what a job wants.
_KEPT = {"SLURM_CONF", "SLURM_CONF_SERVER"}
_REMOVED = ("SLURM_", "SBATCH_", "SRUN_", "PMI_", "PMIX_")


def clean_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without what an enclosing job left in it."""
    return {k: v for k, v in environment.items() if k in _KEPT or not k.startswith(_REMOVED)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Become sbatch; returns only when that is impossible."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        os.execvpe("sbatch", ["sbatch", *words], clean_environment(os.environ))  # noqa: S606
    except OSError as error:
        print(
            f"crater-submit: ERROR: can't run sbatch ({error.strerror}); "
            "install Slurm's client commands or put them on PATH",
            file=sys.stderr,
        )
    return 4
