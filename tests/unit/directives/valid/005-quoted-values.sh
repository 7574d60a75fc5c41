#!/bin/bash
#CRATER model="Llama 3 8B" checkpoint='/project/my ckpt'
