#!/bin/bash
#CRATER model=a=b
