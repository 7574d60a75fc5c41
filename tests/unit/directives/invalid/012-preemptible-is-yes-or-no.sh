#!/bin/bash
#CRATER preemptible=maybe
