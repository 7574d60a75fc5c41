#!/bin/bash
# Rendered by crater 0.1.0 from the template generic for the task t-2.
#SBATCH --job-name=t-2
#CRATER task=generic gpus=0

set -euo pipefail

# What was asked for; what the job really got is in the CRATER_ variables.
export TASK_ID=t-2
export TASK_TYPE=generic

# No program is named: the job says what it was given, and ends.
echo "crater: the task t-2 names no program; this job only reports what it was given" >&2
env | grep -E '^(CRATER_|TASK_|CUDA_VISIBLE_DEVICES=)' | LC_ALL=C sort
