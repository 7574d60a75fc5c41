#!/bin/bash
#CRATER gpus=2 gpu-memory=16GiB cpus=8 numa=strict
srun train
