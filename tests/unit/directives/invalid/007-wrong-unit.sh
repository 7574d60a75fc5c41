#!/bin/bash
#CRATER gpu-memory=16GX memory-bandwidth=140Gb/s ssd-iops=1.5 ssd-latency=1h
