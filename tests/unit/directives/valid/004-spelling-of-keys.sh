#!/bin/bash
#CRATER GPU_Memory=16G NUMA=best-effort Precision=BF16
