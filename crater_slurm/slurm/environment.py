"""The environment for a submission: without what an enclosing job left in it.

A platform often submits from inside a job or a step. The SLURM_ and SBATCH_ variables found there
would act as options of the new job (cores, binding, tasks), so that it runs badly and nobody sees
why. Nothing else is changed.
"""

from __future__ import annotations

from collections.abc import Mapping

#: Where Slurm is and who asks, not what a job wants.
_KEPT = frozenset({"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT"})
#: sudo's tell who asked for a submission as another user, which is none of the job's business.
_REMOVED = ("SLURM_", "SLURMD_", "SBATCH_", "SRUN_", "PMI_", "PMI2_", "PMIX_", "SUDO_")


def clean_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without what an enclosing job, or sudo, left in it."""
    return {k: v for k, v in environment.items() if k in _KEPT or not k.startswith(_REMOVED)}
