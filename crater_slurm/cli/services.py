"""Entry points of the daemons, so that ``pip install`` puts them on the PATH."""

from __future__ import annotations

import sys


def scheduler() -> None:
    """``crater-scheduler``."""
    from crater_slurm.scheduler.main import main

    sys.exit(main())


def io_daemon() -> None:
    """``crater-io-daemon``."""
    from crater_slurm.node.main import main

    sys.exit(main())
