#!/bin/bash
#CRATER gpus=2
#CRATER gpus=4 cpus=1 cpus=2
