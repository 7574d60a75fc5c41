#!/bin/bash
#CRATER checkpoint=s3://models/run-7
