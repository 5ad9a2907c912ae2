"""Fills an image's model cache while it is built: containers start fast and write nothing.

The default model is converted once, and captured for every element type that ``dtype = "bf16"`` may compute
with on the machine where the image runs, which is not the one that builds it.

Conversions are found again by their weights' modification times, which image layers cut to whole seconds:
the weights get a fixed time before they are captured.
"""

import os
import sys

from common.config_file import load_config
from common.model.cache import cached_conversion
from common.model.cpu.library import compile_kernels
from common.model.default_model import default_model_directory
from common.spec import ElementType

FIXED_TIME_S = 1_700_000_000
ELEMENT_TYPES: tuple[ElementType, ...] = ("bfloat16", "float32")


def main() -> None:
    """Works in ``LAMELLA_CACHE``. Raises ConfigError or ModelError."""
    cache = load_config(None).model.cache_directory
    directory = default_model_directory(cache, report)
    for weights in directory.glob("*.safetensors"):
        os.utime(weights, (FIXED_TIME_S, FIXED_TIME_S))
    for element_type in ELEMENT_TYPES:
        cached_conversion(directory, element_type, cache, report)
    # For processors of the kind that builds the image; elsewhere they are compiled at the first start.
    compile_kernels(cache, report)


def report(stage: str) -> None:
    print(stage, file=sys.stderr)


if __name__ == "__main__":
    main()
