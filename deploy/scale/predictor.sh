#!/bin/sh
# Changes how many length predictors run: predictor.sh 3, predictor.sh +1, predictor.sh -1
# (scale.sh says the rest).
exec "$(dirname "$0")/scale.sh" predictor "$@"
