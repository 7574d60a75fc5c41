#!/bin/bash
#CRATER	gpus=2	cpus=4
