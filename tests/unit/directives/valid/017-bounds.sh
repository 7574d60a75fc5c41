#!/bin/bash
#CRATER gpus=1024 cpus=1 gpu-memory=1 cache=1000000GB ssd-latency=0.1us memory-bandwidth=1
