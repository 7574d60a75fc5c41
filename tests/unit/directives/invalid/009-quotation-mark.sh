#!/bin/bash
#CRATER model="Llama 3
#CRATER gpus=2 checkpoint=/a\
