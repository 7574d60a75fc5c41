#!/bin/bash
#CRATER zzzzzz=2
