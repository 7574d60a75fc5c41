#!/bin/bash
#CRATER gpus=2 gpu-memory=16GiB
#CRATER gpus=2 gpu-memory=16384
