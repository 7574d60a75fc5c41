#!/bin/bash
#SBATCH -J train

# a remark
#CRATER gpus=1
#SBATCH -t 10
#CRATER cpus=4
srun train
