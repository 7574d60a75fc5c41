#!/bin/bash
#CRATER gpus=two cpus=-1
#CRATER cpus=1.5
