"""``python -m crater_slurm.scheduler``."""

import sys

from crater_slurm.scheduler.main import main

sys.exit(main())
