#!/bin/sh
# Changes how many prefill instances run: prefill.sh 3, prefill.sh +1, prefill.sh -1 (scale.sh says the rest).
exec "$(dirname "$0")/scale.sh" prefill "$@"
