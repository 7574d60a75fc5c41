"""``crater install``: puts the files that Slurm itself runs where slurm.conf can name them."""

from __future__ import annotations

import stat
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
    """Copy filter, hooks and the jobs' module to a folder. Nothing is enabled by it.

    The copies need no Python package, so they work on nodes and in chroots that have none. Run it
    again after an upgrade.
    """
    from crater_slurm import paths
    from crater_slurm.node import job_path

    folders = {
        "job_submit": _files(paths.share("job_submit")),
        "prolog": _files(paths.share("prolog")),
        "hooks": _files(paths.hooks()),
        "job": job_path.contents(),
    }
    for name, files in folders.items():
        try:
            for inside, (data, mode) in files.items():
                _replace(to / name / inside, data, mode)
        except OSError as error:
            raise CraterError(
                f"can't write below {to}: {error.strerror}; run it as root"
            ) from error
        click.echo(f"{to / name}")
    click.echo("nothing is enabled yet; docs/install.md has the lines for slurm.conf")


def _files(source: Path) -> dict[str, tuple[bytes, int]]:
    """Contents and modes of the files below a folder, by their path in it."""
    return {
        str(file.relative_to(source)): (file.read_bytes(), stat.S_IMODE(file.stat().st_mode))
        for file in sorted(source.rglob("*"))
        if file.is_file() and file.suffix != ".pyc"
    }


def _replace(target: Path, data: bytes, mode: int) -> None:
    """Write a file in one step: slurmctld or a job may be reading the old one."""
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = target.with_name(f".{target.name}.new")
    fresh.write_bytes(data)
    fresh.chmod(mode)
    fresh.replace(target)
