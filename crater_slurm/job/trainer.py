"""Hugging Face's Trainer through crater: a callback that saves, and a folder to resume from.

    callback = CraterCallback(every=500)
    trainer = Trainer(..., args=TrainingArguments(..., save_strategy="no"), callbacks=[callback])
    trainer.train(resume_from_checkpoint=callback.resume_folder())

The model, optimizer, schedule, random state and the Trainer's own state go into the ring at a
step's end, on the first rank: Trainer keeps them whole on every rank with one GPU or DDP. Sharded
training (FSDP, DeepSpeed) is refused: save it by ``crater_slurm.job.dcp``.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
from typing import Any

import torch
from transformers import TrainerCallback

from crater_slurm.job import checkpoint, session
from crater_slurm.job.saving import CheckpointError

__all__ = ["CraterCallback"]


class CraterCallback(TrainerCallback):
    """Saves at every ``every``-th step, ``seconds`` after the last save, and on the job's signal,
    after which training stops. ``requeue``: then ask for the job to be put back in the queue."""

    def __init__(
        self,
        every: int | None = None,
        seconds: float | None = None,
        *,
        name: str = "trainer",
        requeue: bool = False,
    ) -> None:
        self.every = every
        self.seconds = seconds
        self.name = name
        self.requeue = requeue

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Refuse what is sharded, before hours are spent."""
        if getattr(args, "fsdp", None) or getattr(args, "deepspeed", None):
            raise CheckpointError(
                "CraterCallback saves models that are whole on each rank, and this one is sharded. "
                "Save it with torch.distributed.checkpoint and crater_slurm.job.dcp.CraterWriter."
            )

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save when it is due; stop when the signal has come."""
        step = int(state.global_step)
        if checkpoint.due(step, self.every, self.seconds):
            self.save(state, **kwargs)
        if checkpoint.should_stop():
            control.should_training_stop = True

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Wait until all is on disk, then go back into the queue if that was asked for."""
        checkpoint.wait()
        if self.requeue and checkpoint.should_stop() and state.is_world_process_zero:
            checkpoint.requeue("the job's time is over, and training is not")

    def save(
        self, state: Any, *, model: Any, optimizer: Any = None, lr_scheduler: Any = None, **_: Any
    ) -> None:
        """Save what Trainer resumes from; called on every rank."""
        whole: dict[str, Any] = {}
        if session.current().ranks()[0] == 0:
            model = getattr(model, "module", model)
            whole = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict() if optimizer is not None else None,
                "scheduler": lr_scheduler.state_dict() if lr_scheduler is not None else None,
                "random": _random_state(),
                "trainer": _trainer_json(state),
            }
        checkpoint.save(whole, int(state.global_step), name=self.name, only_rank=0)

    def resume_folder(self, step: int | None = None) -> str | None:
        """A folder as Trainer writes them, made of the newest checkpoint (or of ``step``); None
        where there is none, for a training from the start. Every rank calls it."""
        loaded = checkpoint.load(step, name=self.name)
        if loaded is None:
            return None
        root = os.environ.get("CRATER_TMPDIR") or None
        folder = tempfile.mkdtemp(prefix=f"{self.name}-{loaded.step}-", dir=root)
        _write(folder, loaded.state)
        return folder


def _trainer_json(state: Any) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "trainer_state.json")
        state.save_to_json(path)
        with open(path, encoding="utf-8") as file:
            return file.read()


def _random_state() -> dict[str, Any]:
    """As Trainer keeps it in rng_state.pth."""
    found: dict[str, Any] = {"python": random.getstate(), "cpu": torch.random.get_rng_state()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        found["numpy"] = numpy.random.get_state()
    if torch.cuda.is_available():
        found["cuda"] = torch.cuda.random.get_rng_state_all()
    return found


def _write(folder: str, state: dict[str, Any]) -> None:
    files = {
        "pytorch_model.bin": state["model"],
        "optimizer.pt": state["optimizer"],
        "scheduler.pt": state["scheduler"],
        "rng_state.pth": state["random"],
    }
    for name, part in files.items():
        if part is not None:
            torch.save(part, os.path.join(folder, name))
    path = os.path.join(folder, "trainer_state.json")
    with open(path, "w", encoding="utf-8") as file:
        file.write(state["trainer"])
