#!/bin/sh
# Changes how many gateways run: gateway.sh 3, gateway.sh +1, gateway.sh -1 (scale.sh says the rest).
exec "$(dirname "$0")/scale.sh" gateway "$@"
