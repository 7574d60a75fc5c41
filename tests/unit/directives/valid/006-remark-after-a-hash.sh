#!/bin/bash
#CRATER gpus=2 # cpus=8 "not closed
