"""A training script that uses what crater gives a job, and runs without crater too.

    sbatch examples/train_crater.sh
    python examples/train_crater.py --epochs 2 --steps 20            # anywhere, on a CPU

It binds nothing itself, writes one checkpoint per some steps without waiting for a disk, resumes
from the newest whole one, and on the job's signal saves and goes back into the queue.
"""

from __future__ import annotations

import argparse
import os
import sys

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from crater_slurm import job
from crater_slurm.job import checkpoint


class Tokens(Dataset):
    """Made-up sequences, the same for every epoch and process."""

    def __init__(self, samples: int, length: int, vocabulary: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.data = torch.randint(0, vocabulary, (samples, length), generator=generator)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.data[index]


def model_of(vocabulary: int, width: int) -> nn.Module:
    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
    body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return nn.Sequential(nn.Embedding(vocabulary, width), body, nn.Linear(width, vocabulary))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--steps", type=int, default=100, help="steps of an epoch")
    parser.add_argument("--every", type=int, default=10, help="steps between two checkpoints")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--batch", type=int, default=4)
    asked = parser.parse_args()

    env = job.init()  # before CUDA starts
    parallel = env.world_size > 1
    gpu = torch.cuda.is_available()
    if parallel:
        distributed.init_process_group("nccl" if gpu else "gloo")
    device = torch.device("cuda", env.local_rank % torch.cuda.device_count()) if gpu else "cpu"
    if gpu:
        torch.cuda.set_device(device)

    torch.manual_seed(0)
    model: nn.Module = model_of(256, asked.width).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    precision = job.precision()
    scaler = precision.scaler()

    data = Tokens(asked.steps * asked.batch * env.world_size, 32, 256)
    sampler = DistributedSampler(data, env.world_size, env.rank, seed=0)
    loader = DataLoader(data, asked.batch, sampler=sampler, drop_last=True, **job.loader_kwargs())

    done = 0
    loaded = checkpoint.load(map_location=device)
    if loaded is not None:
        model.load_state_dict(loaded.state["model"])
        optimizer.load_state_dict(loaded.state["optimizer"])
        scaler.load_state_dict(loaded.state["scaler"])
        done = loaded.step
        if env.rank == 0:
            print(f"resumed at step {done} from {loaded.source}", flush=True)
    if parallel:
        model = DistributedDataParallel(model)

    def state() -> dict[str, object]:
        plain = model.module if parallel else model
        return {
            "model": plain.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scaler": scaler.state_dict(),
        }

    checkpoint.prepare(state())
    step = 0
    for epoch in range(asked.epochs):
        sampler.set_epoch(epoch)
        for tokens in loader:
            step += 1
            if step <= done:
                continue
            tokens = tokens.to(device, non_blocking=True)
            with precision.autocast():
                scores = model(tokens[:, :-1])
                loss = nn.functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())
            optimizer.zero_grad(set_to_none=True)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            if env.rank == 0:
                print(f"step {step} loss {loss.item():.6f}", flush=True)
            if checkpoint.due(step, every=asked.every):
                # DDP keeps the same state on all ranks, so one of them saves it.
                checkpoint.save(state(), step, only_rank=0)
            if checkpoint.should_stop():
                checkpoint.wait()
                if env.rank == 0:
                    checkpoint.requeue("the time limit is near")
                return 0
    checkpoint.save(state(), step, only_rank=0)
    checkpoint.wait()
    if parallel:
        distributed.destroy_process_group()
    if env.rank == 0:
        print(f"finished at step {step}", flush=True)
    return 0


if __name__ == "__main__":
    # A DataLoader's workers import this file, too.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    sys.exit(main())
