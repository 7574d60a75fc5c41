"""torch.distributed.checkpoint through crater: each rank's shards go into its ring.

    dcp.save(state, storage_writer=CraterWriter(step))          # or dcp.async_save
    dcp.load(state, storage_reader=CraterReader())              # the newest step

A rank's items are saved as its file of the step. Where each item lies is known only when all ranks
have written, so torch's metadata is a checkpoint of its own, ``<name>_meta``, saved by one rank
after the others; a step without it is not loaded. ``save`` returns when the shards are copied;
``CraterWriter.wait`` says when they are on disk.
"""

from __future__ import annotations

import io
import os
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from crater_slurm.job import checkpoint
from crater_slurm.job.saving import CheckpointError, Saving

__all__ = ["CraterReader", "CraterWriter"]


@dataclass(frozen=True)
class _Place:
    """Where an item lies: the rank whose file has it, and its number there."""

    rank: int
    number: int


def _rank() -> int:
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank())
    return 0


class CraterWriter(StorageWriter):
    """Writes one step. ``name`` sets kinds of checkpoints of one job apart."""

    def __init__(self, step: int, *, name: str = "step") -> None:
        super().__init__()
        self.step = step
        self.name = name
        self.savings: list[Saving] = []

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A new save begins; torch's ``checkpoint_id`` has no meaning here."""
        self.savings = []

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Copy this rank's items; done when they are in the ring (or written, without one)."""
        rank = _rank()
        items: list[Any] = []
        results = []
        for number, item in enumerate(plan.items):
            data = planner.resolve_data(item)
            if item.type == WriteItemType.BYTE_IO:
                assert isinstance(data, io.BytesIO)
                items.append(data.getvalue())
                size = data.getbuffer().nbytes
            else:
                assert isinstance(data, torch.Tensor)
                items.append(data.detach())
                size = data.numel() * data.element_size()
            results.append(WriteResult(item.index, size, _Place(rank, number)))
        self.savings.append(checkpoint.save({"items": items}, self.step, name=self.name))
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """All ranks have copied: save where everything lies. Runs on the coordinator alone."""
        places = {one.index: one.storage_data for part in results for one in part}
        whole = replace(metadata, storage_data=places)
        state = {"metadata": whole}
        saving = checkpoint.save(state, self.step, name=f"{self.name}_meta", only_rank=_rank())
        self.savings.append(saving)

    def wait(self, timeout: float | None = None) -> bool:
        """Whether this rank's files of the step are on disk; waits until then."""
        return all(saving.wait(timeout) for saving in self.savings)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """No id is torch's to choose this writer by; it is given as ``storage_writer``."""
        return False


class CraterReader(StorageReader):
    """Reads one step: the newest whole one, or ``step``. Every rank makes one.

    Raises CheckpointError where there is none; ``step`` says which it is. Sharding may differ from
    that of the save: what a rank needs is read from whichever ranks' files have it.
    """

    def __init__(self, step: int | None = None, *, name: str = "step") -> None:
        super().__init__()
        self.name = name
        loaded = checkpoint.load(step, name=f"{name}_meta")
        if loaded is None:
            asked = "newest" if step is None else str(step)
            raise CheckpointError(
                f"There is no distributed checkpoint {name} ({asked}) that all ranks can load."
            )
        self.step = loaded.step
        self._metadata: Metadata = loaded.state["metadata"]

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what the plan names, from the files of as few ranks as hold it."""
        needed = sorted({self._place(item.storage_index).rank for item in plan.items}) or [0]
        loaded = checkpoint.load(self.step, name=self.name, ranks=needed, mmap=True)
        if loaded is None:
            raise CheckpointError(
                f"The files of ranks {needed} of {self.name} {self.step} can't be loaded."
            )
        for item in plan.items:
            place = self._place(item.storage_index)
            _give(item, loaded.state[place.rank]["items"][place.number], planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _place(self, index: MetadataIndex) -> _Place:
        place: _Place = self._metadata.storage_data[index]
        return place

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """See CraterWriter."""
        return False


def _give(item: ReadItem, data: Any, planner: LoadPlanner) -> None:
    if item.type == LoadItemType.BYTE_IO:
        planner.load_bytes(item, io.BytesIO(data))
        return
    for dimension, (start, length) in enumerate(
        zip(item.storage_offsets, item.lengths, strict=True)
    ):
        data = data.narrow(dimension, start, length)
    target = planner.resolve_tensor(item).detach()
    if target.size() != data.size():
        raise CheckpointError(
            f"{item.dest_index.fqn} has the shape {tuple(target.size())}, its checkpoint "
            f"{tuple(data.size())}."
        )
    target.copy_(data)
    planner.commit_tensor(item, target)
