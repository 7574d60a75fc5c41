#!/bin/bash
#CRATER gpuz=1
#CRATER cpus=x
#CRATER numa=
