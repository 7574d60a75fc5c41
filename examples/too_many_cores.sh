#!/bin/bash
#SBATCH --job-name=too-many --nodelist=a1
#CRATER gpus=2 cpus=20 numa=strict

echo "20 cores beside 2 GPUs"
