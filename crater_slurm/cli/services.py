"""Entry points of the other commands and daemons, so that ``pip install`` puts them on the PATH."""

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


def submit() -> None:
    """``crater-submit``."""
    from crater_slurm.cli.submit import main

    sys.exit(main())


def probe() -> None:
    """``crater-probe``."""
    from crater_slurm.cli.probe import main

    sys.exit(main())
