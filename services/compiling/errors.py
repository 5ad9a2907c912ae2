"""What can go wrong with compiling."""

from common.errors import ServiceError


class CompileError(ServiceError):
    """No machine code could be made of the simulator: a tool is missing, the cache cannot be written, or the
    source is not fit for it."""
