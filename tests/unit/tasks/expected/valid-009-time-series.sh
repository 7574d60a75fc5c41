#!/bin/bash
# Rendered by crater 0.1.0 from the template time_series for the task time_series-1.
#SBATCH --job-name=time_series-1
#SBATCH --cpus-per-task=32
#SBATCH --threads-per-core=1
#CRATER task=time_series model=Llama-3-8B precision=bf16 quantization=none gpus=0 cpus=32 avx=avx512
#CRATER memory-bandwidth=140GB/s ssd-iops=800000 ssd-latency=100us io-pattern=random max-wait=1800s
#CRATER min-gpu-utilization=65

set -euo pipefail

# What was asked for; what the job really got is in the CRATER_ variables.
export TASK_ID=time_series-1
export TASK_TYPE=time_series
export TASK_MODEL=Llama-3-8B
export TASK_PRECISION=bf16
export TASK_QUANTIZATION=none
export TASK_IO_PATTERN=random
export TASK_TRAIN_DATASET=s3://datasets/alpaca/train
export TASK_VAL_DATASET=s3://datasets/alpaca/val

export OMP_NUM_THREADS="${CRATER_COMPUTE_CPU_COUNT:-${SLURM_CPUS_ON_NODE:-1}}"

launch=()
launch+=(bash forecast.sh)
exec -- "${launch[@]}"
