#!/bin/bash
#CRATER numa=stric precision=float16 avx=avx1024
