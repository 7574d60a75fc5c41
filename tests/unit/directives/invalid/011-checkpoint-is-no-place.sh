#!/bin/bash
#CRATER checkpoint=ckpt
#CRATER checkpoint=/a/../b
#CRATER checkpoint=s3://
