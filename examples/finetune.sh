#!/bin/bash
#SBATCH --job-name=finetune
#CRATER task=llm_finetune model=Llama-3-8B method=lora precision=bf16
#CRATER gpus=2 gpu-memory=16GiB cpus=8 numa=strict
#CRATER memory-bandwidth=100GB/s ssd-iops=300k ssd-latency=200us checkpoint=on

echo "on $(hostname): $SLURM_CPUS_ON_NODE cores for ${SLURM_JOB_NAME}"
env | grep -E '^(CRATER_|CUDA_VISIBLE)' | sort
