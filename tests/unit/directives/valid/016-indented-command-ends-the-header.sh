#!/bin/bash

   
  echo hello
#CRATER gpus=2
