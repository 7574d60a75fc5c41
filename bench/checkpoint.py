"""Checkpoints: how long training stands still, and how long until the bytes are on the disk.

    python bench/checkpoint.py [--quick | --gib 1 4] [--folder DIR]

In one run and to the same disk: ``torch.save`` with fsync, torch's DCP ``async_save`` and crater's
ring, for states of 1 to 8 GiB held by one process and shared by four. The stall stands beside
memcpy of the same bytes into memory that is warm, the drain beside fio. Each figure is the median
of the saves after a first one that warms up; of several ranks the slowest counts. ``--quick``:
smaller states.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench.table import show  # noqa: E402
from crater_slurm.checkpoint.spec import Spec  # noqa: E402
from crater_slurm.job.wire import Channel  # noqa: E402

_GIB = 1 << 30
_WHOLE, _QUICK = (1, 2, 4, 8), (0.25, 1)
_RANKS = (1, 4)
_IDLE_SECONDS = 10
_METHODS = {
    "memcpy": "memcpy, warm",
    "torch": "torch.save + fsync",
    "dcp": "DCP async_save",
    "crater": "crater",
}
_JOB = {"CRATER_RUN": "1.0", "SLURM_JOB_ID": "1"}


def run() -> None:
    main([])


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="states of 0.25 and 1 GiB")
    parser.add_argument("--gib", type=float, nargs="+", help="these states; they need twice that")
    parser.add_argument("--folder", default="/var/tmp", help="where checkpoints are written")
    asked = parser.parse_args(argv)
    rows: list[list[str]] = []
    with tempfile.TemporaryDirectory(dir=asked.folder, prefix="crater-bench-") as folder:
        for gib in asked.gib or (_QUICK if asked.quick else _WHOLE):
            for ranks in _RANKS:
                rows += _rows(Path(folder), gib, ranks)
        idle = _idle(Path(folder))
    show(
        f"A checkpoint of a state, to {asked.folder} "
        f"(`{' '.join(['python bench/checkpoint.py', *sys.argv[1:]])}`)",
        ["GiB", "ranks", "", "stall, s", "GB/s", "of memcpy, %", "on disk after, s", "GB/s",
         "of fio, %"],
        rows,
    )  # fmt: skip
    show("Idle for 10 s", ["", "CPU, % of one core", "memory, MiB"], idle)


def _rows(folder: Path, gib: float, ranks: int) -> Iterator[list[str]]:
    size = int(gib * _GIB)
    copy = fio = 0.0
    for method, title in _METHODS.items():
        if method == "torch":
            seconds = _fio(folder, size, ranks)
            fio = size / seconds / 1e9
            yield _row(gib, ranks, "fio, direct, fsync", None, seconds, size, 0, 0)
        stall, total = _measure(method, folder, size, ranks)
        copy = copy or size / stall / 1e9
        # The drain is what is left of the way to the disk once the trainer goes on.
        yield _row(gib, ranks, title, stall, total and total, size, copy, fio)
        print(f"{gib} GiB, {ranks} ranks, {title}: {stall:.3f} s, {total:.3f} s", flush=True)


def _row(
    gib: float, ranks: int, title: str, stall: float | None, total: float | None,
    size: int, copy: float, fio: float,
) -> list[str]:  # fmt: skip
    row = [f"{gib:g}", f"{ranks}", title]
    if stall is None:
        row += ["", "", ""]
    else:
        speed = size / stall / 1e9
        row += [f"{stall:.3f}", f"{speed:.2f}", f"{100 * speed / copy:.0f}" if copy else ""]
    if not total:
        return [*row, "", "", ""]
    speed = size / total / 1e9
    return [*row, f"{total:.2f}", f"{speed:.2f}", f"{100 * speed / fio:.0f}" if fio else ""]


def _fio(folder: Path, size: int, ranks: int) -> float:
    """Seconds that fio takes to write the same bytes, a file for each rank, and to fsync them."""
    if shutil.which("fio") is None:
        raise SystemExit("fio is not installed, and the drain is measured against it")
    seconds = []
    for _ in range(3):
        argv = [
            "fio", "--name=drain", f"--directory={folder}", f"--size={size // ranks}",
            f"--numjobs={ranks}", "--group_reporting", "--rw=write", "--bs=8M", "--direct=1",
            "--ioengine=io_uring", "--iodepth=16", "--end_fsync=1", "--fallocate=posix",
            "--output-format=json",
        ]  # fmt: skip
        done = subprocess.run(argv, capture_output=True, text=True, check=True)
        text = done.stdout[done.stdout.index("{") :]
        seconds.append(json.loads(text)["jobs"][0]["write"]["runtime"] / 1e3)
        for file in folder.glob("drain.*"):
            file.unlink()
    return statistics.median(seconds)


def _measure(method: str, folder: Path, size: int, ranks: int) -> tuple[float, float]:
    """Median stall and time until durable, in seconds, of the slowest rank."""
    own = folder / method
    own.mkdir()
    with _worker(own, size, ranks) if method == "crater" else contextlib.nullcontext({}) as ring:
        children = [
            subprocess.Popen(
                [sys.executable, __file__, "--child", method, str(own), str(size // ranks)],
                env=_environment(rank, ranks, own) | _JOB | ring,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(ranks)
        ]
        said = [child.communicate()[0] for child in children]
    if any(child.returncode for child in children):
        raise SystemExit(f"{method} failed")
    shutil.rmtree(own)
    found = [json.loads(text.splitlines()[-1]) for text in said]
    slowest = [[max(each) for each in zip(*part, strict=True)] for part in zip(*found, strict=True)]
    return statistics.median(slowest[0]), statistics.median(slowest[1])


def _environment(rank: int, ranks: int, folder: Path) -> dict[str, str]:
    known = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "CRATER"))}
    return known | {
        "RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(ranks), "CRATER_CHECKPOINT_PATH": str(folder),
        "BENCH_STORE": f"{folder}/store", "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // ranks)),
    }  # fmt: skip


@contextlib.contextmanager
def _worker(folder: Path, size: int, ranks: int) -> Iterator[dict[str, str]]:
    """A real checkpoint worker, and what crater-io-daemon does: hand it the trainers."""
    with (
        tempfile.TemporaryDirectory() as run,
        _process(run, folder, 2 * size + (64 << 20) * ranks) as (channel, _),
    ):
        door = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        door.bind(f"{run}/ring.sock")
        door.listen(16)
        threading.Thread(target=_hand_over, args=(door, channel), daemon=True).start()
        threading.Thread(target=_listen, args=(channel,), daemon=True).start()
        yield {"CRATER_RING": f"{run}/ring.sock"}
        door.close()


@contextlib.contextmanager
def _process(run: str, folder: Path, ring_bytes: int) -> Iterator[tuple[Channel, int]]:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(f"{run}/worker.sock")
    listener.listen(4)
    code = (
        f"import os, sys; os.dup2({listener.fileno()}, 3); sys.path.insert(0, {str(ROOT)!r});"
        "from crater_slurm.checkpoint.worker import main; main()"
    )
    with subprocess.Popen(
        [sys.executable, "-I", "-c", code], pass_fds=(listener.fileno(), 3)
    ) as process:
        channel = Channel.connect(f"{run}/worker.sock")
        spec = Spec(
            job_id="1", cluster="bench", user="root", uid=os.getuid(), gid=os.getgid(),
            node="n1", run="1.0", folder=str(folder), ring_bytes=ring_bytes,
        )  # fmt: skip
        channel.send({"op": "spec", "spec": spec.to_json()})
        yield channel, process.pid
        process.terminate()


def _hand_over(door: socket.socket, channel: Channel) -> None:
    with contextlib.suppress(OSError):
        while True:
            connection, _ = door.accept()
            message, fds = Channel(connection).receive()
            told = {"op": "lane", "open": message, "limit": 1 << 40, "pid": 0}
            channel.send(told, (connection.fileno(), *fds))
            connection.close()
            for fd in fds:
                os.close(fd)


def _listen(channel: Channel) -> None:
    with contextlib.suppress(Exception):
        while True:
            channel.receive()


def _idle(folder: Path) -> list[list[str]]:
    """What an idle worker with a lane costs, and an idle crater-io-daemon."""
    rows = []
    own = folder / "idle"
    own.mkdir()
    with tempfile.TemporaryDirectory() as run, _process(run, own, 64 << 20) as (_, pid):
        rows.append(["checkpoint worker", *_cost(pid)])
    with tempfile.TemporaryDirectory() as run:
        config = Path(run) / "crater.yaml"
        config.write_text(json.dumps({"node": _daemon_settings(run)}))
        argv = [sys.executable, "-m", "crater_slurm.node", "--foreground"]
        env = os.environ | {"CRATER_CONFIG": str(config), "PYTHONPATH": str(ROOT)}
        with subprocess.Popen(argv, env=env, stderr=subprocess.DEVNULL) as daemon:
            rows.append(["crater-io-daemon", *_cost(daemon.pid)])
            daemon.terminate()
    return rows


def _daemon_settings(run: str) -> dict[str, Any]:
    return {
        "socket": f"{run}/node.sock",
        "state_dir": f"{run}/state",
        "report": False,
        "cache": {"mount_point": f"{run}/cache", "require_mount": False},
        "checkpoints": {"ring_socket": f"{run}/ring.sock"},
        "listen": "",
    }


def _cost(pid: int) -> list[str]:
    """CPU in % of one core over some seconds, and resident MiB, once it has started."""
    time.sleep(5)
    before = _cpu(pid)
    time.sleep(_IDLE_SECONDS)
    percent = 100 * (_cpu(pid) - before) / _IDLE_SECONDS
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return [f"{percent:.2f}", f"{pages * os.sysconf('SC_PAGE_SIZE') / (1 << 20):.0f}"]


def _cpu(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# What one rank does


def _child(method: str, folder: str, size: int) -> None:
    import torch
    from torch import distributed

    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    distributed.init_process_group(
        "gloo", init_method=f"file://{os.environ['BENCH_STORE']}", rank=rank, world_size=world
    )
    piece = 64 << 20
    sizes = [min(piece, size - at) for at in range(0, size, piece)]
    state = {f"r{rank}.{i}": torch.full((n,), i % 251, dtype=torch.uint8)
             for i, n in enumerate(sizes)}  # fmt: skip
    save = globals()[f"_{method}"](state, Path(folder), rank)
    stalls, totals = [], []
    for step in range(4):
        for tensor in state.values():
            tensor.add_(1)
        distributed.barrier()
        begin = time.perf_counter()
        finish = save(step)
        stalls.append(time.perf_counter() - begin)
        finish()
        distributed.barrier()
        totals.append(time.perf_counter() - begin)
        _forget(folder, method, step, rank)
    print(json.dumps([stalls[1:], totals[1:]]))


def _forget(folder: str, method: str, step: int, rank: int) -> None:
    """Remove what was saved, so that the disk need not hold all steps."""
    if method == "crater" and rank == 0:
        shutil.rmtree(f"{folder}/step-{step:09d}", ignore_errors=True)
    if method == "dcp" and rank == 0:
        shutil.rmtree(f"{folder}/{step}", ignore_errors=True)
    if method == "torch":
        Path(f"{folder}/{rank}.pt").unlink()


def _memcpy(state: dict[str, Any], folder: Path, rank: int) -> Any:
    import ctypes

    there = [(t.clone(), t) for t in state.values()]

    def save(step: int) -> Any:
        for target, source in there:
            ctypes.memmove(target.data_ptr(), source.data_ptr(), source.nbytes)
        return lambda: None

    return save


def _torch(state: dict[str, Any], folder: Path, rank: int) -> Any:
    import torch

    def save(step: int) -> Any:
        part = folder / f"{rank}.part"
        with part.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        part.rename(folder / f"{rank}.pt")
        return lambda: None

    return save


def _dcp(state: dict[str, Any], folder: Path, rank: int) -> Any:
    from torch.distributed import checkpoint

    def save(step: int) -> Any:
        writer = checkpoint.FileSystemWriter(folder / f"{step}", sync_files=True)
        return checkpoint.async_save(state, storage_writer=writer).result

    return save


def _crater(state: dict[str, Any], folder: Path, rank: int) -> Any:
    from crater_slurm.job import checkpoint

    checkpoint.prepare(state)

    def save(step: int) -> Any:
        saving = checkpoint.save(state, step)

        def finish() -> None:
            saving.wait()
            if saving.error or saving.how != "ring":
                raise SystemExit(f"not by the ring: {saving.how} {saving.error}")

        return finish

    return save


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        _child(sys.argv[2], sys.argv[3], int(sys.argv[4]))
    else:
        main()
