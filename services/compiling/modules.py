"""Of which modules machine code is made: those that a simulation spends its time in."""

PACKAGES = ("common", "gateway", "scheduler", "prefill", "decode", "attention", "services")
"""All that a simulation imports of, which are copied."""

_COMMON = (
    "epochs kv.blocks kv.link_watch laws length_points messages.load next_pass phases room_mates sequences"
)
_DECODE = (
    "arrivals attention_needs batches context_turns departures entering events expectations forecast"
    " giving_way hand_over holdings homes moves outlook pulls sequence speed state stepping swapping"
)
_PREFILL = (
    "arrivals batching chunks entering events forecast handover holdings offers prompts sends sequence state"
)
_SCHEDULER = (
    "arrivals barring bookings delivery events kv_links learned_times membership overdue peers placing"
    " planning standby state trust views waiting_room"
)
_POLICY = (
    "admission best_fit candidates coupling decode_admission decode_batching decode_binding"
    " decode_rebalancing dispatch fitting grouping hand_over length_history mixed_batching power_of_two"
    " preemption prefill_batching pull_budget rebalance shadow workload"
)
_SIMULATOR = (
    "attention_cost attention_course attention_engine attention_host attention_performance attention_rates"
    " attention_workers clock cluster computed_work conditions decode_room drawing engine gaps gateway host"
    " instance links network pipeline_plan pipelined prefill_room records run scheduler schedulers seat shape"
    " staff stages step_times"
)
_PERFORMANCE = "aiconfigurator curves linear operators profiled roofline splitwise vidur"

COMPILED = (
    *(f"common.{name}" for name in _COMMON.split()),
    *(f"decode.{name}" for name in _DECODE.split()),
    *(f"prefill.{name}" for name in _PREFILL.split()),
    *(f"scheduler.{name}" for name in _SCHEDULER.split()),
    *(f"scheduler.policy.{name}" for name in _POLICY.split()),
    "services.hosts.load_report",
    *(f"services.simulator.{name}" for name in _SIMULATOR.split()),
    *(f"services.simulator.performance.{name}" for name in _PERFORMANCE.split()),
)
"""Nothing with Structs that msgspec serialises in a simulation, by keywords that a compiled class loses, and
no generic class (``rewriting``). What is compiled asks by ``is None`` whether one of a class with ``__len__``
is there: mypyc takes every object of such a class for true. An enum's member that is a constant is final:
after ``phase is RUNNING`` what asks for another phase is unreachable to it, also past a call that changes
it."""
