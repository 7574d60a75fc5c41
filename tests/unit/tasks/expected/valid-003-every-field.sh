#!/bin/bash
# Rendered by crater 0.1.0 from the template llm_finetune for the task every.field:3.
#SBATCH --job-name=llama-sft
#SBATCH --partition=gpu,big
#SBATCH --account=ai-lab
#SBATCH --qos=normal
#SBATCH --reservation=maint-1
#SBATCH --time=1-00:00:00
#SBATCH --nodes=2
#SBATCH --chdir="/project/run 1"
#SBATCH --output=/project/log/%j.out
#SBATCH --cpus-per-task=16
#SBATCH --threads-per-core=1
#CRATER task=llm_finetune model=Llama-3-8B model-params=8.03B method=lora framework=torchtune
#CRATER precision=bf16 quantization=none optimizer=adamw lora-rank=16 micro-batch=2
#CRATER sequence-length=2048 activation-checkpointing=yes sharding=zero2 tensor-parallel=2
#CRATER pipeline-parallel=2 traced-memory=21001MiB gpus=4 gpu-memory=24000MiB gpu-type=a100
#CRATER tensor-cores=yes mig=3g.20gb gpu-sharing=no driver=535.104 cuda=12.2 cpus=16
#CRATER physical-cores=yes avx=avx2 memory-bandwidth=70.5GB/s ssd-iops=300000 ssd-latency=87.2us
#CRATER io-pattern=random cache=200GB checkpoint=s3://bucket/llama checkpoint-keep=3
#CRATER checkpoint-keep-every=1000 checkpoint-credentials=own:research
#CRATER stage=/data/sets,s3://bucket/set ring=16GB numa=strict max-wait=1440s min-gpu-utilization=65
#CRATER preemptible=no mode=advise

set -euo pipefail

# What was asked for; what the job really got is in the CRATER_ variables.
export TASK_ID=every.field:3
export TASK_TYPE=llm_finetune
export TASK_MODEL=Llama-3-8B
export TASK_PRECISION=bf16
export TASK_QUANTIZATION=none
export TASK_METHOD=lora
export TASK_FRAMEWORK=torchtune
export TASK_OPTIMIZER=adamw
export TASK_LORA_RANK=16
export TASK_MICRO_BATCH=2
export TASK_SEQUENCE_LENGTH=2048
export TASK_SHARDING=zero2
export TASK_TENSOR_PARALLEL=2
export TASK_PIPELINE_PARALLEL=2
export TASK_ACTIVATION_CHECKPOINTING=yes
export TASK_IO_PATTERN=random
export TASK_TRAIN_DATASET=s3://datasets/alpaca/train
export TASK_VAL_DATASET=s3://datasets/alpaca/val
export TASK_DATASET_SIZE_GB=1200
export TASK_MEAN_SAMPLE_TOKENS=512
export TASK_STAGE=sft
export TASK_LORA_ALPHA=32

# Tokenised data and compiled kernels stay on the node, where there is a cache.
export HF_DATASETS_CACHE="${HF_DATASETS_CACHE:-${CRATER_CACHE_PATH:-${TMPDIR:-/tmp}}/hf-datasets}"
export TRITON_CACHE_DIR="${TRITON_CACHE_DIR:-${CRATER_TMPDIR:-${TMPDIR:-/tmp}}/triton}"
# The data loader forks after the tokeniser has threads.
export TOKENIZERS_PARALLELISM="${TOKENIZERS_PARALLELISM:-false}"

cd -- '/project/run 1'

# Every process of the job finds the first node.
read -r first_node < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export MASTER_ADDR="$first_node"
export MASTER_PORT="$((20000 + SLURM_JOB_ID % 10000))"

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
launch+=(apptainer exec)
launch+=(--nv)
for folder in /project:/project /data:/data:ro ${folders[@]+"${folders[@]}"}; do launch+=(--bind "$folder"); done
launch+=(--pwd '/project/run 1')
launch+=(/images/torch.sif)
# One process for each GPU; torchrun tells them apart.
export OMP_NUM_THREADS="$((${CRATER_COMPUTE_CPU_COUNT:-$SLURM_CPUS_ON_NODE} / 4))"
if [ "$OMP_NUM_THREADS" -lt 1 ]; then OMP_NUM_THREADS=1; fi
launch+=(torchrun --nnodes="$SLURM_JOB_NUM_NODES" --nproc-per-node=4
    --rdzv-id="$SLURM_JOB_ID" --rdzv-backend=c10d --rdzv-endpoint="$MASTER_ADDR:$MASTER_PORT")
launch+=(/project/train.py --lr 1e-4)
exec -- "${launch[@]}"
