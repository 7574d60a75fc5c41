#!/bin/bash
#CRATER model=ab checkpoint=/ab
