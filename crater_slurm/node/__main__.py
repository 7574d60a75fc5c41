"""``python3 -m crater_slurm.node``: the daemon without any installed command."""

import sys

from crater_slurm.node.main import main

if __name__ == "__main__":
    sys.exit(main())
