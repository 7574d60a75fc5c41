#!/bin/bash
# Rendered by crater 0.1.0 from the template llm_finetune for the task task-20240520-llama3-8b.
#SBATCH --job-name=task-20240520-llama3-8b
#SBATCH --gres=gpu:2
#SBATCH --cpus-per-task=32
#SBATCH --threads-per-core=1
#CRATER task=llm_finetune model=Llama-3-8B precision=bf16 quantization=none gpus=2 gpu-memory=16GiB
#CRATER gpu-type=a100-pcie-40gb cpus=32 avx=avx512 memory-bandwidth=140GB/s ssd-iops=800000
#CRATER ssd-latency=100us io-pattern=random max-wait=1800s min-gpu-utilization=65

set -euo pipefail

# What was asked for; what the job really got is in the CRATER_ variables.
export TASK_ID=task-20240520-llama3-8b
export TASK_TYPE=llm_finetune
export TASK_MODEL=Llama-3-8B
export TASK_PRECISION=bf16
export TASK_QUANTIZATION=none
export TASK_IO_PATTERN=random
export TASK_TRAIN_DATASET=s3://datasets/alpaca/train
export TASK_VAL_DATASET=s3://datasets/alpaca/val

# Tokenised data and compiled kernels stay on the node, where there is a cache.
export HF_DATASETS_CACHE="${HF_DATASETS_CACHE:-${CRATER_CACHE_PATH:-${TMPDIR:-/tmp}}/hf-datasets}"
export TRITON_CACHE_DIR="${TRITON_CACHE_DIR:-${CRATER_TMPDIR:-${TMPDIR:-/tmp}}/triton}"
# The data loader forks after the tokeniser has threads.
export TOKENIZERS_PARALLELISM="${TOKENIZERS_PARALLELISM:-false}"

# No program is named: the job says what it was given, and ends.
echo "crater: the task task-20240520-llama3-8b names no program; this job only reports what it was given" >&2
env | grep -E '^(CRATER_|TASK_|CUDA_VISIBLE_DEVICES=)' | LC_ALL=C sort
