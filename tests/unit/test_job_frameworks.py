"""torch.distributed.checkpoint, Lightning, Hugging Face's Trainer and the example, with real torch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples/train_crater.py"
CLEAN = {k: v for k, v in os.environ.items() if not k.startswith(("CRATER", "SLURM"))}
CLEAN |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def script(text: str, folder: Path, ranks: int = 1, **env: str) -> str:
    """Run a script on one or more ranks; all they print."""
    file = folder / "script.py"
    file.write_text(text)
    argv = [sys.executable, str(file)]
    if ranks > 1:
        argv = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        argv += [f"--nproc-per-node={ranks}", str(file)]
    done = subprocess.run(
        argv, env=CLEAN | {"CRATER_CHECKPOINT_DIR": str(folder / "kept")} | env,
        cwd=folder, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


_DCP = """
import os, torch
from torch import distributed
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from crater_slurm.job.dcp import CraterReader, CraterWriter

distributed.init_process_group("gloo")
mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
whole = torch.arange(64, dtype=torch.float32).reshape(16, 4)
def state(of):
    return {"sharded": distribute_tensor(of, mesh, [Shard(0)]), "plain": of[:2].clone(),
            "epoch": 7 if of.any() else 0}
mode = os.environ["MODE"]
if mode == "save":
    for step in (1, 2):
        writer = CraterWriter(step)
        dcp.save(state(whole * step), storage_writer=writer)
        assert writer.wait(60)
else:
    target = state(torch.zeros_like(whole))
    reader = CraterReader(int(os.environ["STEP"]) if "STEP" in os.environ else None)
    dcp.load(target, storage_reader=reader)
    step = reader.step
    assert torch.equal(target["sharded"].full_tensor(), whole * step), target
    assert torch.equal(target["plain"], whole[:2] * step) and target["epoch"] == 7
    if distributed.get_rank() == 0:
        print("loaded", step)
distributed.destroy_process_group()
"""


def test_dcp_loads_what_it_saved_also_on_another_number_of_ranks(tmp_path: Path) -> None:
    script(_DCP, tmp_path, 2, MODE="save")
    assert "loaded 2" in script(_DCP, tmp_path, 3, MODE="load")
    (there,) = (tmp_path / "kept").glob("step_meta-000000002")
    there.rename(tmp_path / "away")  # a step whose metadata never came is none
    assert "loaded 1" in script(_DCP, tmp_path, 2, MODE="load")


_LIGHTNING = """
import os, torch, warnings
warnings.filterwarnings("ignore")
import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint
from crater_slurm.job.lightning import CraterCheckpointIO

class Tiny(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def training_step(self, batch, index):
        return self.layer(batch[0]).square().mean()
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)

data = torch.utils.data.TensorDataset(torch.randn(32, 4))

def fit(steps, plugins, path=None):
    L.seed_everything(1, verbose=False)
    keep = ModelCheckpoint(dirpath="points", every_n_train_steps=2, save_top_k=-1, save_last=True)
    trainer = L.Trainer(
        max_steps=steps, accelerator="cpu", logger=False, callbacks=[keep] if plugins else [],
        plugins=plugins, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=bool(plugins),
    )
    model = Tiny()
    trainer.fit(model, torch.utils.data.DataLoader(data, 4, shuffle=False), ckpt_path=path)
    return f"{model.layer.weight.sum().item():.9f} {trainer.global_step}"

straight = fit(16, [])
fit(8, [CraterCheckpointIO()])
print(open("points/last.ckpt").read())
print(straight, "=", fit(16, [CraterCheckpointIO()], "points/last.ckpt"))
"""


def test_lightning_resumes_where_it_stopped(tmp_path: Path) -> None:
    pytest.importorskip("lightning", reason="lightning is not installed")
    pointer, sums = script(_LIGHTNING, tmp_path).splitlines()
    assert json.loads(pointer) == {"kind": "crater checkpoint", "name": "lightning", "step": 8}
    straight, resumed = sums.split(" = ")
    assert resumed == straight
    assert straight.endswith(" 16")


_TRAINER = """
import os, torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed
from crater_slurm.job.trainer import CraterCallback

set_seed(3)
config = GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=1, n_head=2)
rows = torch.randint(0, 64, (40, 8), generator=torch.Generator().manual_seed(0))
data = [{"input_ids": row, "labels": row} for row in rows]

def train(steps, callbacks, folder=None):
    set_seed(3)
    arguments = TrainingArguments(
        "out", max_steps=steps, per_device_train_batch_size=4, report_to=[],
        save_strategy="no", use_cpu=True, logging_steps=100, disable_tqdm=True,
        lr_scheduler_type="constant", dataloader_pin_memory=False,
    )
    trainer = Trainer(
        GPT2LMHeadModel(config), arguments, train_dataset=data, callbacks=callbacks
    )
    trainer.train(resume_from_checkpoint=folder)
    weights = sum(p.double().sum().item() for p in trainer.model.parameters())
    return f"{weights:.6f} {trainer.state.global_step}"

straight = train(12, [])
train(6, [CraterCallback(every=3)])
callback = CraterCallback(every=3)
folder = callback.resume_folder()
assert folder is not None
print("sums", straight, "=", train(12, [callback], folder))
"""


def test_hugging_faces_trainer_resumes_where_it_stopped(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    said = script(_TRAINER, tmp_path)
    (sums,) = (line for line in said.splitlines() if line.startswith("sums "))
    straight, resumed = sums.removeprefix("sums ").split(" = ")
    assert resumed == straight
    assert straight.endswith(" 12")


def example(folder: Path, *arguments: str, ranks: int = 1, **env: str) -> list[str]:
    return script(
        f"import sys; sys.argv = ['train', *{list(arguments)!r}]\n"
        f"exec(compile(open({str(EXAMPLE)!r}).read(), 'train', 'exec'))",
        folder, ranks, **env,
    ).splitlines()  # fmt: skip


def test_the_example_resumes_on_two_ranks(tmp_path: Path) -> None:
    words = ("--epochs=1", "--steps=8", "--every=4")
    assert example(tmp_path, *words, ranks=2)[-1] == "finished at step 8"
    again = example(tmp_path, *words, ranks=2)
    assert "resumed at step 8 from folder" in again


def test_the_example_saves_on_the_signal_and_goes_on_from_there(tmp_path: Path) -> None:
    argv = [sys.executable, str(EXAMPLE), "--steps=100000", "--every=100000"]
    env = CLEAN | {"CRATER_CHECKPOINT_DIR": str(tmp_path / "kept")}
    with subprocess.Popen(
        argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path
    ) as training:
        assert training.stdout is not None
        until = time.monotonic() + 240
        for line in training.stdout:
            assert time.monotonic() < until
            if line.startswith("step 5 "):
                training.send_signal(signal.SIGUSR2)
                break
        said, warned = training.communicate(timeout=240)
    assert training.returncode == 0, warned
    last = [line for line in said.splitlines() if line.startswith("step ")]
    (kept,) = (tmp_path / "kept").glob("step-*")
    stopped = int(kept.name.partition("-")[2])
    assert not last or last[-1].startswith(f"step {stopped} ")
    assert "the job is not requeued: there is no checkpoint worker here to ask" in warned
