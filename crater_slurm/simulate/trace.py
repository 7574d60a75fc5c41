"""Tasks and nodes of a trace, whatever file they come from."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from crater_slurm.errors import UsageError
from crater_slurm.placement.packing.kernels import WHOLE
from crater_slurm.placement.packing.state import ANY_MODEL, Cluster, Need

#: What openb counts per node, in the order of ``Need.take``: milli-CPU, MiB of memory.
OPENB_KINDS = ("cpu_milli", "memory_mib")
#: GPUs of a node that can be told apart in the bits of a number.
MOST_GPUS = 60


@dataclass(frozen=True, slots=True)
class Task:
    """One task of a trace; times are seconds since the trace's beginning.

    ``need`` is what it takes of each of its ``nodes``, which all start together; ``limit`` is the
    time limit that it asked for, None where the trace has none.
    """

    name: str
    need: Need
    arrival: float = 0.0
    duration: float = 0.0
    limit: float | None = None
    nodes: int = 1


@dataclass(slots=True)
class Notes:
    """What a reader assumed or left out, in sentences, and of how many jobs (0: of the trace)."""

    said: Counter[str] = field(default_factory=Counter)

    def say(self, text: str) -> None:
        """Something that holds for the trace."""
        self.said[text] += 0

    def count(self, text: str) -> None:
        """Something that holds for one more job."""
        self.said[text] += 1

    def lines(self) -> list[str]:
        return [f"{text}: {count} jobs" if count else text for text, count in self.said.items()]


@dataclass(frozen=True, slots=True)
class Trace:
    """A trace that is being read: its tasks once through, as they stand in the file.

    ``recorded``: its times of arrival are those of a whole cluster, so a replay keeps their
    pattern; where not, arrivals are drawn. ``notes`` is complete when the last task was read.
    """

    format: str
    tasks: Iterator[Task]
    notes: Notes
    recorded: bool


@dataclass(frozen=True, slots=True)
class Nodes:
    """The nodes of a trace: their names, and what makes a fresh cluster of them."""

    names: tuple[str, ...]
    gpus: tuple[int, ...]
    models: tuple[int, ...]
    rest: tuple[tuple[int, ...], ...]
    model_names: tuple[str, ...]
    kinds: tuple[str, ...] = OPENB_KINDS
    #: What a job is taken to use of memory bandwidth, where that is counted.
    bandwidth_mb_s_per_cpu: int = 0
    notes: tuple[str, ...] = ()

    def need(
        self,
        *,
        cpu_milli: int,
        memory_mib: int,
        gpus: int = 0,
        gpu_milli: int = WHOLE,
        models: Sequence[str] = (),
    ) -> Need:
        """A job's need in this cluster's kinds; what a trace can't say is filled in by rule."""
        known = {
            "cpu_milli": cpu_milli,
            "memory_mib": memory_mib,
            "bandwidth_mb_s": cpu_milli * self.bandwidth_mb_s_per_cpu // 1000,
        }
        return Need(
            count=gpus,
            milli=gpu_milli if gpus else 0,
            take=tuple(known.get(kind, 0) for kind in self.kinds),
            allowed=self.models_of(models),
        )

    def every(self, step: int) -> Nodes:
        """A smaller cluster of the same make: each ``step``-th node, from the first on."""
        return replace(
            self,
            names=self.names[::step],
            gpus=self.gpus[::step],
            models=self.models[::step],
            rest=self.rest[::step],
        )

    def cluster(self) -> Cluster:
        return Cluster(self.gpus, self.models, self.rest)

    def models_of(self, names: Sequence[str]) -> int:
        """Bits of the named GPU models; any for no name. Names that no node has are no bit."""
        if not names:
            return ANY_MODEL
        return sum(1 << i for i, name in enumerate(self.model_names) if name in names)


def rows(file: Path, wanted: Sequence[str]) -> Iterator[tuple[int, dict[str, str]]]:
    """Lines of a CSV file with their number, one at a time. UsageError without these columns."""
    try:
        with file.open(newline="", encoding="utf-8") as opened:
            reader = csv.DictReader(opened)
            missing = [name for name in wanted if name not in (reader.fieldnames or ())]
            if missing:
                raise UsageError(f"{file} has no column {missing[0]!r}; it has {reader.fieldnames}")
            for row in reader:
                if None in row or None in row.values():
                    where = f"{file}:{reader.line_num}"
                    raise UsageError(f"{where}: not as many fields as the header has")
                yield reader.line_num, row
    except OSError as error:
        raise UsageError(f"can't read {file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{file} is not text in UTF-8") from error
    except csv.Error as error:
        raise UsageError(f"{file} is not CSV: {error}") from error


def whole(row: Mapping[str, str], name: str, where: str) -> int:
    """A whole number of a row, not negative; UsageError with the place otherwise."""
    text = (row.get(name) or "0").strip()
    if not (text.isascii() and text.isdigit()) or len(text) > 15:
        raise UsageError(f"{where}: {name} is {text!r}, which is no whole number from 0")
    return int(text)


def openb_nodes(file: Path) -> Nodes:
    """Nodes of ``openb_node_list_*.csv``: sn, cpu_milli, memory_mib, gpu, model."""
    names, gpus, rest, models = [], [], [], []
    known: dict[str, int] = {}
    for line, row in rows(file, ("sn", "cpu_milli", "memory_mib", "gpu", "model")):
        where = f"{file}:{line}"
        names.append(row["sn"])
        gpus.append(whole(row, "gpu", where))
        rest.append(tuple(whole(row, kind, where) for kind in OPENB_KINDS))
        models.append(known.setdefault(row["model"] or "none", len(known)))
    if not names:
        raise UsageError(f"{file} lists no node")
    if max(gpus) > MOST_GPUS or len(known) > 60:
        raise UsageError(
            f"{file}: a node has at most {MOST_GPUS} GPUs, and there are at most 60 models"
        )
    return Nodes(tuple(names), tuple(gpus), tuple(models), tuple(rest), tuple(known))


def openb_tasks(file: Path, nodes: Nodes) -> Iterator[Task]:
    """Tasks of ``openb_pod_list_*.csv``, as they stand in the file; memory does not grow."""
    wanted = ("name", "cpu_milli", "memory_mib", "num_gpu", "gpu_milli")
    for line, row in rows(file, wanted):
        where = f"{file}:{line}"
        count, milli = whole(row, "num_gpu", where), whole(row, "gpu_milli", where)
        if count > 1:
            milli = WHOLE
        if milli > WHOLE or (count == 1 and milli == 0):
            raise UsageError(f"{where}: gpu_milli is {milli}; a GPU has 1 to {WHOLE}")
        created = whole(row, "creation_time", where)
        ended = whole(row, "deletion_time", where)
        models = [name for name in (row.get("gpu_spec") or "").split("|") if name]
        need = nodes.need(
            cpu_milli=whole(row, "cpu_milli", where),
            memory_mib=whole(row, "memory_mib", where),
            gpus=count,
            gpu_milli=milli,
            models=models,
        )
        yield Task(row["name"], need, float(created), float(max(0, ended - created)))
