#!/bin/sh
# Changes how many attention workers run: attention.sh 3, attention.sh +1, attention.sh -1
# (scale.sh says the rest).
exec "$(dirname "$0")/scale.sh" attention "$@"
