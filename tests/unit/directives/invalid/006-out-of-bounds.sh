#!/bin/bash
#CRATER gpus=1025 cpus=0 gpu-memory=17TiB max-wait=0
