#!/bin/bash
#CRATER gpus=2
#CRATER cpus=4
srun train
