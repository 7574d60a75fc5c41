"""crater-io-daemon: reads the settings, puts the parts together, runs until SIGTERM."""

from __future__ import annotations

import argparse
import contextlib
import logging
import logging.handlers
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from crater_slurm import __version__, systemd
from crater_slurm.config.load import load
from crater_slurm.errors import CraterError
from crater_slurm.node import job_path, lifecycle, metrics_page, observe, peer_door, upkeep
from crater_slurm.node.questions import OPERATION, Questions
from crater_slurm.node.request import Answer, Request
from crater_slurm.node.rings import Rings
from crater_slurm.node.server import Server, dispatch
from crater_slurm.node.services import Services
from crater_slurm.node.watch import Watcher
from crater_slurm.node.workers import Workers

_log = logging.getLogger("crater.node")


class Daemon:
    """The running parts, started and stopped in the order that keeps a job from falling between."""

    def __init__(self, services: Services) -> None:
        self.services = services
        self._memory, self._cache, self._space = upkeep.loops(services)
        self._observer: observe.Observer | None = None
        if services.settings.node.observe:
            self._observer = observe.Observer(services, services.observed)
            seconds = services.settings.node.sample_seconds
            self._observe = upkeep.Loop("observe", seconds, self._observer.round)
        self._workers = Workers(services)
        services.life.on_allowance = self._workers.allow
        self._questions = Questions(services, self._workers)
        self._rings = Rings(services, self._workers)
        self._peers = peer_door.server_of(services, self._workers)
        self._server = Server(services.settings.node.socket, self._handle)
        self._metrics = metrics_page.Page(services, self._workers.count)
        self._watcher = Watcher(services.settings.node.cgroup_root, services.binder.reconcile)

    def start(self) -> None:
        services = self.services
        reason = services.binder.unusable()
        if reason:
            _log.info("binding: memory stays soft on this node: %s", reason)
        upkeep.recover(services)
        services.cache.ensure_mounted()
        if services.spool:
            services.spool.start()
        if services.observed:
            services.observed.start()
        if not reason:
            self._watcher.start()
        self._memory.start()
        self._cache.start()
        self._space.start()
        if self._observer:
            self._observe.start()
        if services.settings.node.checkpoints.enabled:
            job_path.prepare(services)
        self._workers.start()
        if services.settings.node.checkpoints.enabled:
            self._rings.start()
        if self._peers:
            self._peers.start()
        self._server.start()
        self._metrics.start()

    def stop(self) -> None:
        self._metrics.stop()
        self._server.stop()
        if self._peers:
            self._peers.stop()
        if self.services.settings.node.checkpoints.enabled:
            self._rings.stop()
        self._workers.stop()
        if not self.services.binder.unusable():
            self._watcher.stop()
            self.services.binder.release()
        self._memory.stop()
        self._cache.stop()
        self._space.stop()
        if self._observer and self._observe.stop():
            self._observer.close()
        if self.services.observed:
            self.services.observed.stop()
        if self.services.spool:
            self.services.spool.stop()

    def _handle(self, request: Request) -> Answer:
        if request.operation == OPERATION:
            return self._questions.answer(request)
        answer = dispatch(self.services, request)
        if request.operation in ("prolog", "epilog"):
            answer.afterwards.append(self._workers.wake)
        if request.operation == "epilog":
            answer.afterwards.append(self._cache.wake)
            if self._observer:
                answer.afterwards.append(self._observe.wake)
        return answer


def main(argv: Sequence[str] | None = None) -> int:
    """Run the daemon; the exit code is 0 after SIGTERM, or that of the error's class."""
    parser = argparse.ArgumentParser(
        prog="crater-io-daemon",
        description="Prepares this node for Slurm jobs: plans, cache folders, memory binding.",
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="settings file")
    parser.add_argument(
        "--foreground", action="store_true", help="stay in the foreground, as systemd wants it"
    )
    parser.add_argument("--version", action="version", version=f"crater-io-daemon {__version__}")
    options = parser.parse_args(argv)
    try:
        return _run(options.config, options.foreground)
    except CraterError as error:
        print(f"crater-io-daemon: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"crater-io-daemon: couldn't start: {error}", file=sys.stderr)
        return 1


def _log_to_syslog() -> None:
    """In the background stderr is somebody's terminal or pipe; without syslog it has to do."""
    with contextlib.suppress(OSError):
        handler = logging.handlers.SysLogHandler(
            "/dev/log", logging.handlers.SysLogHandler.LOG_DAEMON
        )
        handler.setFormatter(logging.Formatter("crater-io-daemon: %(message)s"))
        logging.getLogger().handlers = [handler]
        with Path(os.devnull).open("w") as null:
            os.dup2(null.fileno(), 2)


def _run(config: Path | None, foreground: bool) -> int:
    logging.basicConfig(
        level=logging.INFO, format="crater-io-daemon: %(message)s", stream=sys.stderr
    )
    settings = load(config).settings
    os.umask(0o022)  # the hooks of every user look for our marks and our socket
    node = settings.node
    node.socket.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
    node.state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    # Two locks: neither the socket nor the records may ever have two masters.
    locks = [
        lifecycle.OnlyOne(node.state_dir / "lock"),
        lifecycle.OnlyOne(node.socket.with_name(node.socket.name + ".lock")),
    ]
    ready = None if foreground else lifecycle.detach()
    for lock in locks:
        lock.write_pid()
    # The kernel may give the signal to any thread, which does not wake the main one; the wake-up
    # descriptor is written from whichever thread it is.
    end_read, end_write = os.pipe()
    os.set_blocking(end_write, False)
    signal.set_wakeup_fd(end_write)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    daemon = Daemon(Services(settings))
    daemon.start()
    _log.info("ready at %s", node.socket)
    systemd.notify("READY=1")
    if ready:
        _log_to_syslog()
        ready()
    os.read(end_read, 1)
    systemd.notify("STOPPING=1")
    daemon.stop()
    _log.info("stopped")
    for lock in locks:
        lock.release()
    return 0
