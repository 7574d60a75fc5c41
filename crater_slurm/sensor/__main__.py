"""``python -m crater_slurm.sensor``: crater-probe serve, where no command is installed."""

from __future__ import annotations

import logging
import sys

from crater_slurm.config import load
from crater_slurm.errors import CraterError
from crater_slurm.sensor.main import serve

if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="crater-probe: %(message)s")
    try:
        serve(load(None).settings)
    except CraterError as error:
        print(f"crater-probe: ERROR: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
