"""Steps made by hand: files of random bytes with a manifest, as a worker leaves them in a cache."""

from __future__ import annotations

import random
from pathlib import Path

from crater_slurm.checkpoint import sums
from crater_slurm.checkpoint.spec import Remote, Spec
from crater_slurm.job import layout

MIB = 1 << 20


def spec(folder: Path, url: str = "", **more: object) -> Spec:
    """A job's spec; ``options`` and ``credentials`` are the remote's."""
    remote = Remote(
        url=url,
        options=more.pop("options", {}),  # type: ignore[arg-type]
        credentials=more.pop("credentials", {}),  # type: ignore[arg-type]
        profile=more.pop("profile", ""),  # type: ignore[arg-type]
    )
    plain: dict[str, object] = {
        "job_id": "7",
        "cluster": "c1",
        "user": "ada",
        "uid": 1000,
        "gid": 1000,
        "node": "n1",
        "run": "7.0",
        "folder": str(folder),
    }
    return Spec(remote=remote, **{**plain, **more})  # type: ignore[arg-type]


def entry(name: str, rank: int, data: bytes) -> layout.FileEntry:
    found = layout.chunk_sums(memoryview(data), sums.crc32)
    return layout.FileEntry(name, rank, len(data), found)


def make_step(
    folder: Path,
    step: int,
    sizes: dict[int, int],
    *,
    world: int | None = None,
    run: str = "7.0",
    node: str = "n1",
    name: str = "step",
    time: float | None = None,
    job_id: str = "7",
    seed: int | None = None,
) -> tuple[str, layout.Manifest]:
    """A part with one file per rank of ``sizes`` (rank: bytes); its folder and manifest."""
    where = folder / layout.step_name(step, name)
    where.mkdir(parents=True, exist_ok=True)
    chance = random.Random(seed if seed is not None else f"{step}{run}{node}")
    files = []
    for rank, size in sizes.items():
        data = chance.randbytes(size)
        (where / layout.file_name(rank)).write_bytes(data)
        files.append(entry(layout.file_name(rank), rank, data))
    manifest = layout.Manifest(
        step=step,
        world_size=world or len(sizes),
        files=files,
        name=name,
        run=run,
        job_id=job_id,
        cluster="c1",
        node=node,
        time=1_790_000_000.0 + step if time is None else time,
    )
    (where / layout.part_name(manifest.ranks)).write_text(manifest.to_json())
    return str(where), manifest


def content(folder: str | Path) -> dict[str, bytes]:
    """The ranks' files of a step."""
    return {p.name: p.read_bytes() for p in Path(folder).glob("rank-*")}


class Flushes:
    """A flusher's surroundings: what it logged and told, a clock that stands, no waiting."""

    def __init__(self) -> None:
        self.now = 1_790_000_100.0
        self.lines: list[str] = []
        self.changes: list[tuple[int, str]] = []

    def log(self, level: str, text: str) -> None:
        self.lines.append(f"{level}: {text}")

    def changed(self, step: object) -> None:
        self.changes.append((step.manifest.step, step.state))  # type: ignore[attr-defined]

    def clock(self) -> float:
        return self.now
