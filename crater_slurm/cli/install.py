"""``crater install``: puts the files that Slurm itself runs where slurm.conf can name them."""

from __future__ import annotations

import shutil
from pathlib import Path

import click

from crater_slurm.errors import CraterError


@click.command()
@click.option(
    "--to",
    type=click.Path(path_type=Path),
    default=Path("/usr/lib/crater"),
    show_default=True,
    help="The folder; made if it is not there.",
)
def install(to: Path) -> None:
    """Copy filter and hooks to a folder of their own. Nothing is enabled by it.

    The copies need no Python package, so they work on nodes and in chroots that have none. Run it
    again after an upgrade.
    """
    from crater_slurm import paths

    sources = {
        "job_submit": paths.share("job_submit"),
        "prolog": paths.share("prolog"),
        "hooks": paths.hooks(),
    }
    for name, source in sources.items():
        try:
            for file in sorted(source.rglob("*")):
                if file.is_dir() or file.suffix == ".pyc":
                    continue
                target = to / name / file.relative_to(source)
                target.parent.mkdir(parents=True, exist_ok=True)
                fresh = target.with_name(f".{target.name}.new")
                shutil.copy(file, fresh)  # contents and mode
                fresh.replace(target)  # slurmctld may be reading the old one
        except OSError as error:
            raise CraterError(
                f"can't write below {to}: {error.strerror}; run it as root"
            ) from error
        click.echo(f"{to / name}")
    click.echo("nothing is enabled yet; docs/install.md has the lines for slurm.conf")
