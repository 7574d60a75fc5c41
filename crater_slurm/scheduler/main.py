"""``crater-scheduler``: start the service, serve the API, stop cleanly."""

from __future__ import annotations

import argparse
import gc
import logging
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from crater_slurm import systemd
from crater_slurm.config import load
from crater_slurm.config.settings import Scheduler
from crater_slurm.errors import ConfigError, CraterError

_log = logging.getLogger("crater.scheduler")


def main(argv: Sequence[str] | None = None) -> int:
    """Run until SIGTERM or SIGINT; exit code of a CraterError when it can't start."""
    parser = argparse.ArgumentParser(prog="crater-scheduler", description=__doc__)
    parser.add_argument("--config", type=Path, help="settings file")
    parser.add_argument(
        "--foreground", action="store_true", help="accepted for symmetry; it always stays there"
    )
    options = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        settings = load(options.config).settings
        from crater_slurm.scheduler import api
        from crater_slurm.scheduler.service import Service

        service = Service(settings)
        service.start()
    except CraterError as error:
        print(f"crater-scheduler: ERROR: {error}", file=sys.stderr)
        return error.exit_code
    # Submissions share the interpreter with the API: short turns, and no long collections.
    sys.setswitchinterval(0.0005)
    gc.collect()
    gc.freeze()
    app = api.build(service, settings.scheduler.admin_users, service.registry)
    try:
        _serve(app, settings.scheduler)
    except CraterError as error:
        print(f"crater-scheduler: ERROR: {error}", file=sys.stderr)
        return error.exit_code
    finally:
        service.stop()
    return 0


def _serve(app: object, settings: Scheduler) -> None:
    """Serve the API until a signal; the filter answers also when the API's port is taken."""
    import uvicorn

    listen = settings.listen
    host, _, port = listen.rpartition(":")
    cert, key = _tls(settings)
    config = uvicorn.Config(
        app,  # type: ignore[arg-type]
        host=host.strip("[]") or "127.0.0.1",
        port=int(port),
        log_level="warning",
        timeout_graceful_shutdown=3,
        ssl_certfile=cert,
        ssl_keyfile=key,
    )
    server = uvicorn.Server(config)
    try:
        bound = config.bind_socket()
    except (SystemExit, OSError):
        _log.error("the API can't listen at %s: no explain, no reports; submissions go on", listen)
        _wait_for_signal()
        return
    systemd.notify("READY=1")
    server.run(sockets=[bound])


def _tls(settings: Scheduler) -> tuple[str | None, str | None]:
    """Certificate and key for uvicorn; none when the API is plain http. Raises ConfigError."""
    cert, key = settings.tls_cert_file, settings.tls_key_file
    if cert is None and key is None:
        return None, None
    if cert is None or key is None:
        raise ConfigError("scheduler.tls_cert_file and scheduler.tls_key_file belong together")
    for name, file in (("tls_cert_file", cert), ("tls_key_file", key)):
        try:
            mode = file.stat().st_mode
        except OSError as error:
            raise ConfigError(f"scheduler.{name}: {file}: {error.strerror}") from error
        if name == "tls_key_file" and mode & 0o077:
            raise ConfigError(f"scheduler.{name}: {file} may be read by others; chmod 0600 {file}")
    return str(cert), str(key)


def _wait_for_signal() -> None:
    done = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: done.set())
    systemd.notify("READY=1")
    done.wait()
