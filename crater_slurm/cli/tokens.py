"""``crater tokens``: who may ask crater-scheduler's API, and what."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping

import click

from crater_slurm.cli.output import print_json, print_table
from crater_slurm.errors import UsageError


@click.group()
def tokens() -> None:
    """Tokens of platforms that use the API."""


@tokens.command()
@click.argument("name")
@click.option("--client", help="Whose token it is; NAME when not given. Tasks belong to clients.")
@click.option(
    "--scope", "scopes", multiple=True, help="submit, read, cancel or nodes; all if none."
)
@click.option("--user", help="Cluster user whose jobs the client's tasks are.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def create(
    name: str, client: str | None, scopes: tuple[str, ...], user: str | None, as_json: bool
) -> None:
    """Make a token and print it, this once."""
    from crater_slurm.alldata import tokens as made
    from crater_slurm.cli.profiles import open_store

    token, text = made.create(name, client or name, scopes or made.SCOPES, user, time.time())
    with open_store() as store:
        store.add_token(token)
    if as_json:
        print_json({"name": name, "client": token.client, "token": text})
        return
    click.echo(text)
    if sys.stdout.isatty():
        click.echo("keep it now: only a hash of it is stored", err=True)


@tokens.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_(as_json: bool) -> None:
    """List tokens, never their secrets."""
    from crater_slurm.alldata.payload import iso
    from crater_slurm.cli.profiles import open_store

    with open_store() as store:
        found = store.api_tokens()
    shown = [
        {
            "name": one.name,
            "client": one.client,
            "scopes": sorted(one.scopes),
            "user": one.user,
            "created": iso(one.created),
            "used": iso(one.used),
            "revoked": iso(one.revoked),
        }
        for one in found
    ]
    if as_json:
        print_json(shown)
    elif not shown:
        click.echo("there are no tokens; make one with 'crater tokens create NAME'")
    else:
        titles = ("NAME", "CLIENT", "SCOPES", "USER", "CREATED", "LAST USED", "REVOKED")
        print_table(titles, [_row(one) for one in shown])


def _row(one: Mapping[str, object]) -> list[str]:
    scopes = one["scopes"]
    assert isinstance(scopes, list)
    words = {**one, "scopes": ",".join(scopes)}
    return [str(value) if value else "-" for value in words.values()]


@tokens.command()
@click.argument("name")
def revoke(name: str) -> None:
    """Take a token out of use at once; its name stays taken."""
    from crater_slurm.cli.profiles import open_store

    with open_store() as store:
        if not store.revoke_token(name, time.time()):
            raise UsageError(f"there is no token {name!r} in use; 'crater tokens list' shows all")
    click.echo(f"{name} is revoked")
