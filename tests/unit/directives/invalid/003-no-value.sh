#!/bin/bash
#CRATER gpus numa=
#CRATER strict
