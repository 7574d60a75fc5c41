#!/bin/bash
#CRATER gpu=2
