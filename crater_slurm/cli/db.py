"""``crater db``: make, upgrade and check the store."""

from __future__ import annotations

import json

import click


def store_url() -> str:
    """``store.url`` of the running command's settings."""
    from crater_slurm.cli.context import loaded

    return loaded().settings.store.url


@click.group()
def db() -> None:
    """The store of node profiles and decisions."""


@db.command()
def upgrade() -> None:
    """Make the store, or bring it to this version. Safe to repeat; data stays."""
    from crater_slurm.store import maintenance

    done = maintenance.upgrade(store_url())
    if done.current == done.newest:
        click.echo(f"{done.store} is at revision {done.newest} already")
    elif done.current is None:
        click.echo(f"{done.store} made, revision {done.newest}")
    else:
        click.echo(f"{done.store} upgraded from revision {done.current} to {done.newest}")


@db.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def current(as_json: bool) -> None:
    """Say at which revision the store is."""
    from crater_slurm.store import maintenance

    found = maintenance.revisions(store_url())
    if as_json:
        fields = {"store": found.store, "current": found.current, "newest": found.newest}
        click.echo(json.dumps(fields, indent=2))
    elif found.current is None:
        click.echo(f"{found.store} has no tables yet; run 'crater db upgrade'")
    elif found.current == found.newest:
        click.echo(f"{found.store} is at revision {found.current}, the newest")
    else:
        click.echo(
            f"{found.store} is at revision {found.current}, this crater-slurm at {found.newest}"
        )


@db.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def check(as_json: bool) -> None:
    """Check that the store opens, has the right tables and is undamaged; count its rows."""
    from crater_slurm.errors import StoreError
    from crater_slurm.store import maintenance

    report = maintenance.check(store_url())
    if as_json:
        fields = {
            "store": report.store,
            "revision": report.revision,
            "rows": report.rows,
            "problems": report.problems,
        }
        click.echo(json.dumps(fields, indent=2))
    else:
        click.echo(f"{report.store}, revision {report.revision}")
        for table, rows in report.rows.items():
            click.echo(f"  {table:<12} {rows:>10}")
    if report.problems:
        raise StoreError("\n".join(report.problems))
