"""When it is decided where a sequence is decoded.

``early``: with where its prompt is computed (Splitwise IV-A), so that KV can go layer by layer meanwhile.
``late``: once its prompt is computed, by what instances report then and what a predictor has said meanwhile
(TetriInfer 3.3.4, whose dispatcher stands behind prefill; DistServe 4.3). Even so an instance is chosen and
booked early: nobody computes a prompt that nobody has room for, and where the scheduler does not answer later
it is that one.
"""

from common.config import DecodeBinding
from common.ids import InstanceId


def is_bound_late(binding: DecodeBinding, prefill_instance: InstanceId, decode_instance: InstanceId) -> bool:
    """Whether the question is asked again. Not of what is decoded where it is computed: no KV moves."""
    return binding == "late" and prefill_instance != decode_instance
