"""An error that comes from another process, or a copy: what it says, what it holds, and its class."""

import copy
from pathlib import Path

import pytest

from common.errors import BusTimeout, ConfigError, InvalidRequest, LamellaError, Overloaded
from services.bench.traces import TraceError
from services.simulator.performance.files import PerformanceFileError

ERRORS = [
    ConfigError("instance.block_size", 3, "must be a power of two"),
    InvalidRequest("top_p = 3", param="top_p"),
    Overloaded("later", retry_after_s=0.5),
    BusTimeout("no reply within 3 s"),
    TraceError(Path("trace.csv"), 7, "prompt_tokens must be a number"),
    PerformanceFileError(Path("gemm.csv"), "row 3", "must be over 0"),
    LamellaError(),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda each: type(each).__name__)
def test_an_error_made_anew_is_the_same(error: LamellaError) -> None:
    other = copy.copy(error)
    assert type(other) is type(error)
    assert (str(other), other.args, other.__dict__) == (str(error), error.args, error.__dict__)
