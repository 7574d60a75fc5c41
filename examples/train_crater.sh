#!/bin/bash
#SBATCH --job-name=train
#SBATCH --time=04:00:00
#SBATCH --signal=USR2@120
#SBATCH --requeue
#CRATER gpus=2 cpus=16 precision=bf16 numa=strict
#CRATER checkpoint=on
# Two GPUs with their own cores and memory; two minutes before the end the steps get SIGUSR2, the
# script saves, and the job goes back into the queue.
srun --ntasks=1 torchrun --standalone --nproc-per-node="$SLURM_GPUS_ON_NODE" \
    examples/train_crater.py --epochs 10
