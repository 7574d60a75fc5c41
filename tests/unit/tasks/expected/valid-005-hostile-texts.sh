#!/bin/bash
# Rendered by crater 0.1.0 from the template multimodal for the task hostile.
#SBATCH --job-name=hostile
#SBATCH --chdir=/tmp
#SBATCH --gres=gpu:2
#SBATCH --cpus-per-task=32
#SBATCH --threads-per-core=1
#CRATER task=multimodal 'model=x'"'"'; touch /tmp/owned; echo "$(id)" `id` \ #end' precision=bf16
#CRATER quantization=none gpus=2 gpu-memory=16GiB gpu-type=a100-pcie-40gb cpus=32 avx=avx512
#CRATER memory-bandwidth=140GB/s ssd-iops=800000 ssd-latency=100us io-pattern=random
#CRATER 'checkpoint=/c k/'"'"'$(touch owned)'"'"'' max-wait=1800s min-gpu-utilization=65

set -euo pipefail

# What was asked for; what the job really got is in the CRATER_ variables.
export TASK_ID=hostile
export TASK_TYPE=multimodal
export TASK_MODEL='x'"'"'; touch /tmp/owned; echo "$(id)" `id` \ #end'
export TASK_PRECISION=bf16
export TASK_QUANTIZATION=none
export TASK_IO_PATTERN=random
export TASK_TRAIN_DATASET='/data/$(touch owned)/`touch owned`/'"'"'; touch owned; '"'"''
export TASK_VAL_DATASET='-rf "$HOME" *? ~ {a,b} !! %s é 数据'

# Decoded samples stay on the node, where there is a cache.
export HF_DATASETS_CACHE="${HF_DATASETS_CACHE:-${CRATER_CACHE_PATH:-${TMPDIR:-/tmp}}/hf-datasets}"
export TOKENIZERS_PARALLELISM="${TOKENIZERS_PARALLELISM:-false}"

cd -- /tmp

launch=()
launch+=(printf '%s\n' '$(touch owned)' '`touch owned`' ''"'"'' '"' '\' 'a b' '' '*' -x '{{ x }}' '{% raw %}' '; touch owned' '#' '数据' '!!')
exec -- "${launch[@]}"
