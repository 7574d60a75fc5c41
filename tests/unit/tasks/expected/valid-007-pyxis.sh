#!/bin/bash
# Rendered by crater 0.1.0 from the template rlhf for the task in-pyxis.
#SBATCH --job-name=in-pyxis
#SBATCH --gres=gpu:2
#SBATCH --cpus-per-task=32
#SBATCH --threads-per-core=1
#CRATER task=rlhf model=Llama-3-8B precision=bf16 quantization=none gpus=2 gpu-memory=16GiB
#CRATER gpu-type=a100-pcie-40gb cpus=32 avx=avx512 memory-bandwidth=140GB/s ssd-iops=800000
#CRATER ssd-latency=100us io-pattern=random max-wait=1800s min-gpu-utilization=65

set -euo pipefail

# What was asked for; what the job really got is in the CRATER_ variables.
export TASK_ID=in-pyxis
export TASK_TYPE=rlhf
export TASK_MODEL=Llama-3-8B
export TASK_PRECISION=bf16
export TASK_QUANTIZATION=none
export TASK_IO_PATTERN=random
export TASK_TRAIN_DATASET=s3://datasets/alpaca/train
export TASK_VAL_DATASET=s3://datasets/alpaca/val

export TOKENIZERS_PARALLELISM="${TOKENIZERS_PARALLELISM:-false}"
# Memory of one turn must be usable for the other.
export PYTORCH_CUDA_ALLOC_CONF="${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}"

# The job's own folders on the node, and those of crater_slurm.job, which the container must see.
ring="${CRATER_RING:-}"
folders=()
for folder in "${CRATER_CHECKPOINT_PATH:-}" "${CRATER_DATASET_PATH:-}" "${CRATER_CACHE_PATH:-}" \
    "${CRATER_TMPDIR:-}" "${CRATER_JOB_PATH:-}" "${ring%/*}"; do
    if [ -d "$folder" ]; then folders+=("$folder"); fi
done

launch=()
# One task on each node, with all that the job has there.
launch+=(srun --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1
    --cpus-per-task="${SLURM_CPUS_PER_TASK:-$SLURM_CPUS_ON_NODE}" --kill-on-bad-exit=1)
mounts=(/data:/data:ro)
for folder in ${folders[@]+"${folders[@]}"}; do mounts+=("$folder:$folder"); done
launch+=(--container-image=nvcr.io/nvidia/pytorch:24.05-py3)
if [ -n "${mounts[*]-}" ]; then
    launch+=(--container-mounts="$(IFS=,; echo "${mounts[*]}")")
fi
launch+=(bash run.sh)
exec -- "${launch[@]}"
