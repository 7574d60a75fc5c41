#!/bin/bash
# crater is what this cluster runs
#CRATERS are many
#CRATERgpus
