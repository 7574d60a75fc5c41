"""``crater observations``: what jobs were seen to need, by which crater predicts."""

from __future__ import annotations

import click

from crater_slurm.cli.output import print_json, print_table
from crater_slurm.cli.profiles import open_store

_TITLES = (
    *("JOB", "NODE", "WORKLOAD", "SETTINGS", "GPU MEMORY", "HOST MEMORY"),
    *("GPU USE", "SEEN FOR", "COUNTS"),
)


@click.group()
def observations() -> None:
    """Peaks of jobs, measured on the nodes while they ran."""


@observations.command("list")
@click.option("--key", help="Only of this workload: model|method|framework, as the list shows it.")
@click.option(
    "--limit",
    default=50,
    show_default=True,
    type=click.IntRange(min=1),
    help="How many, the newest first.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_(key: str | None, limit: int, as_json: bool) -> None:
    """List what was learnt, the newest first.

    COUNTS says whether predictions use it: a job without a model, or one that failed soon, teaches
    nothing.
    """
    from crater_slurm.cli import observed_view
    from crater_slurm.store.observations import observation_to_dict

    with open_store() as store:
        found = store.observations(key, limit)
    shown = [observation_to_dict(one) | {"counts": one.counts} for one in found]
    if as_json:
        print_json(shown)
    elif not shown:
        what = f"of {key!r} " if key else ""
        click.echo(f"nothing {what}was observed yet: jobs with a plan are watched while they run")
    else:
        print_table(_TITLES, [observed_view.row(seen) for seen in shown])
