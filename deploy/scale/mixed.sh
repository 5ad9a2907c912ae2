#!/bin/sh
# Changes how many mixed instances run: mixed.sh 3, mixed.sh +1, mixed.sh -1 (scale.sh says the rest).
exec "$(dirname "$0")/scale.sh" mixed "$@"
