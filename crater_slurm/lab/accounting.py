"""A lab's accounting: slurmdbd over a MariaDB of its own, so that jobs are recorded for good.

Both run beside slurmctld and go with the lab. Only labs with the machine's own Slurm have it: the
roots of other releases come without slurmdbd.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path

from crater_slurm.errors import LabError
from crater_slurm.lab import ready, services
from crater_slurm.lab.cluster import Cluster
from crater_slurm.lab.places import CONTROLLER, INSIDE, Folders
from crater_slurm.lab.roots import SlurmRoot

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
#: The last one is called by mariadb-install-db, which fails mutely without it.
_PROGRAMS = ("slurmdbd", "mariadbd", "mariadb-install-db", "my_print_defaults")
#: What slurm.conf says of it.
SETTINGS = {
    "AccountingStorageType": "accounting_storage/slurmdbd",
    "AccountingStorageHost": CONTROLLER,
    # Without it a job's GPUs are not recorded.
    "AccountingStorageTRES": "gres/gpu",
}


def prepare(lab: Cluster, slurm: SlurmRoot) -> None:
    """Write slurmdbd.conf and make the database's folder. LabError when a program is missing."""
    missing = [name for name in _PROGRAMS if shutil.which(name, path=_PATH) is None]
    if slurm.folder is not None or missing:
        raise LabError(
            "a lab with accounting needs the machine's own Slurm (no --slurm) and the packages "
            f"slurmdbd, mariadb-server-core and mariadb-client-core; missing: {missing or 'none'}"
        )
    inside = Folders(INSIDE)
    conf = {
        "AuthType": "auth/munge",
        "DbdHost": CONTROLLER,
        "DbdAddr": "127.0.0.1",
        "SlurmUser": slurm.slurm_user,
        "StorageType": "accounting_storage/mysql",
        "StorageHost": "127.0.0.1",
        "StorageUser": "root",
        "LogFile": f"{inside.log}/slurmdbd.log",
        "PidFile": f"{inside.slurm_pids}/slurmdbd.pid",
    }
    file = lab.folders.etc / "slurmdbd.conf"
    file.touch(mode=0o600)
    file.write_text("".join(f"{key}={value}\n" for key, value in conf.items()))
    os.chown(file, slurm.slurm_uid, 0)  # slurmdbd takes no other
    _install(lab.folders.database)


def _install(folder: Path) -> None:
    folder.mkdir(mode=0o700)
    command = ["mariadb-install-db", "--no-defaults", f"--datadir={folder}", "--user=root"]
    command += ["--skip-test-db", "--auth-root-authentication-method=normal"]
    environment = {"PATH": _PATH}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise LabError(f"the lab's MariaDB can't be set up: {done.stdout[-500:]}{done.stderr}")


def start(lab: Cluster, deadline: float) -> None:
    """Start both and make the cluster known, before slurmctld registers there."""
    lab.supervisor.start(services.mariadb())
    lab.supervisor.start(services.slurmdbd())
    while True:
        words = ["sacctmgr", "--immediate", "add", "cluster", lab.spec.name]
        done = lab.run(words, user="root")
        if done.returncode == 0 or "already exists" in done.stdout:
            return
        for service in ("mariadb", "slurmdbd"):
            if lab.supervisor.pid(service) is None:
                raise LabError(f"{service} ended at its start:\n{ready.why(lab, service)}")
        if time.monotonic() > deadline:
            raise LabError(f"slurmdbd does not answer: {done.stderr.strip()}")
        time.sleep(0.1)
