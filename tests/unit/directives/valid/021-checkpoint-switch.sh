#!/bin/bash
#CRATER checkpoint=Yes preemptible=TRUE gpus=0
