#!/bin/bash
#CRATER gpus=1
cd /tmp
#CRATER gpus=8
#CRATER cpus=8
