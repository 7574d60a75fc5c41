#!/bin/bash
# CRATER gpus=1
##CRATER gpus=2
#crater gpus=3
  #CRATER gpus=4
#Crater: gpus=5
