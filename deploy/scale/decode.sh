#!/bin/sh
# Changes how many decode instances run: decode.sh 3, decode.sh +1, decode.sh -1 (scale.sh says the rest).
exec "$(dirname "$0")/scale.sh" decode "$@"
