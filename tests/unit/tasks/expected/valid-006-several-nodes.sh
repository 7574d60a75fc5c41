#!/bin/bash
# Rendered by crater 0.1.0 from the template llm_pretrain for the task many-nodes.
#SBATCH --job-name=many-nodes
#SBATCH --partition=gpu
#SBATCH --nodes=4
#SBATCH --gres=gpu:8
#SBATCH --cpus-per-task=32
#SBATCH --threads-per-core=1
#CRATER task=llm_pretrain model=Llama-3-8B precision=bf16 quantization=none gpus=8
#CRATER gpu-type=a100-pcie-40gb cpus=32 avx=avx512 memory-bandwidth=140GB/s ssd-iops=800000
#CRATER ssd-latency=100us io-pattern=random max-wait=1800s min-gpu-utilization=65

set -euo pipefail

# What was asked for; what the job really got is in the CRATER_ variables.
export TASK_ID=many-nodes
export TASK_TYPE=llm_pretrain
export TASK_MODEL=Llama-3-8B
export TASK_PRECISION=bf16
export TASK_QUANTIZATION=none
export TASK_IO_PATTERN=random
export TASK_TRAIN_DATASET=s3://datasets/alpaca/train
export TASK_VAL_DATASET=s3://datasets/alpaca/val

export TRITON_CACHE_DIR="${TRITON_CACHE_DIR:-${CRATER_TMPDIR:-${TMPDIR:-/tmp}}/triton}"
# A collective that hangs ends the job instead of holding its nodes.
export TORCH_NCCL_ASYNC_ERROR_HANDLING="${TORCH_NCCL_ASYNC_ERROR_HANDLING:-1}"

# Every process of the job finds the first node.
read -r first_node < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export MASTER_ADDR="$first_node"
export MASTER_PORT="$((20000 + SLURM_JOB_ID % 10000))"

launch=()
# One task on each node, with all that the job has there.
launch+=(srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1
    --cpus-per-task="${SLURM_CPUS_PER_TASK:-$SLURM_CPUS_ON_NODE}" --kill-on-bad-exit=1)
# One process for each GPU; torchrun tells them apart.
export OMP_NUM_THREADS="$((${CRATER_COMPUTE_CPU_COUNT:-$SLURM_CPUS_ON_NODE} / 8))"
if [ "$OMP_NUM_THREADS" -lt 1 ]; then OMP_NUM_THREADS=1; fi
launch+=(torchrun --nnodes="$SLURM_JOB_NUM_NODES" --nproc-per-node=8
    --rdzv-id="$SLURM_JOB_ID" --rdzv-backend=c10d --rdzv-endpoint="$MASTER_ADDR:$MASTER_PORT")
launch+=(/project/pretrain.py --config 8b.yaml)
exec -- "${launch[@]}"
