#!/bin/bash
# Rendered by crater 0.1.0 from the template inference for the task inference-1.
#SBATCH --job-name=inference-1
#SBATCH --gres=gpu:2
#SBATCH --cpus-per-task=32
#SBATCH --threads-per-core=1
#CRATER task=inference model=Llama-3-8B precision=bf16 quantization=none gpus=2 gpu-memory=16GiB
#CRATER gpu-type=a100-pcie-40gb cpus=32 avx=avx512 memory-bandwidth=140GB/s ssd-iops=800000
#CRATER ssd-latency=100us io-pattern=random max-wait=1800s min-gpu-utilization=65

set -euo pipefail

# What was asked for; what the job really got is in the CRATER_ variables.
export TASK_ID=inference-1
export TASK_TYPE=inference
export TASK_MODEL=Llama-3-8B
export TASK_PRECISION=bf16
export TASK_QUANTIZATION=none
export TASK_IO_PATTERN=random
export TASK_TRAIN_DATASET=s3://datasets/alpaca/train
export TASK_VAL_DATASET=s3://datasets/alpaca/val

export TRITON_CACHE_DIR="${TRITON_CACHE_DIR:-${CRATER_TMPDIR:-${TMPDIR:-/tmp}}/triton}"

launch=()
launch+=(serve --port 8000)
exec -- "${launch[@]}"
