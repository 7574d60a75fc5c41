#!/bin/bash
#CRATER
#CRATER   
echo no
