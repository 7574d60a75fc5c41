#!/bin/bash
#CRATER gpus=2 mode=off
