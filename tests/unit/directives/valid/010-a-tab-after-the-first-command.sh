#!/bin/bash
cd /tmp
#CRATER	gpus=8
