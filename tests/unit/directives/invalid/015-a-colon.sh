#!/bin/bash
#CRATER gpus:2
