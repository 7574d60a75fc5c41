"""``crater alldata``: a platform to try an integration against."""

from __future__ import annotations

from pathlib import Path

import click

from crater_slurm.errors import UsageError


@click.group()
def alldata() -> None:
    """Try the platform's side without a platform."""


@alldata.command()
@click.option(
    "--listen", default="127.0.0.1:9195", show_default=True, help="Address; keep it on loopback."
)
@click.option("--user", default="", help="Basic authentication: the user that is expected.")
@click.option("--password-file", type=click.Path(path_type=Path), help="File with the password.")
@click.option("--hmac-key-file", type=click.Path(path_type=Path), help="File with the key.")
@click.option("--token-file", type=click.Path(path_type=Path), help="Token expected of a poller.")
def fake(
    listen: str,
    user: str,
    password_file: Path | None,
    hmac_key_file: Path | None,
    token_file: Path | None,
) -> None:
    """Run a fake AllData server: a task queue, a receiver of callbacks, faults on demand.

    POST /callback takes callbacks and checks them; GET / shows what arrived. POST /control/queue
    puts a task into the queue (GET /api/tasks), POST /control/faults makes things go wrong.
    """
    import uvicorn

    from crater_slurm.alldata.fake import Fake, build
    from crater_slurm.alldata.receiver import Receiver
    from crater_slurm.alldata.secrets import read_secret

    def secret(file: Path | None, option: str) -> str:
        return read_secret(file, option) if file else ""

    host, colon, port = listen.rpartition(":")
    if not colon or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UsageError(f"--listen {listen!r} is no address; write 127.0.0.1:9195")
    if user and password_file is None:
        raise UsageError("--user needs --password-file")
    made = Fake(
        Receiver(
            user,
            secret(password_file, "--password-file"),
            secret(hmac_key_file, "--hmac-key-file"),
        ),
        token=secret(token_file, "--token-file"),
    )
    click.echo(f"fake AllData at http://{listen}/ (callbacks: /callback, queue: /api/tasks)")
    uvicorn.run(
        build(made), host=host.strip("[]") or "127.0.0.1", port=int(port), log_level="warning"
    )
