#!/bin/sh
# Changes how many schedulers run: scheduler.sh 3, scheduler.sh +1, scheduler.sh -1 (scale.sh says the rest).
exec "$(dirname "$0")/scale.sh" scheduler "$@"
