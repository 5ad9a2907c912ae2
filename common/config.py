"""Settings: a frozen section per role, with the defaults. ``common.config_file`` reads and checks them.

Measured values are results and do not belong here.
"""

from pathlib import Path
from typing import Literal

import msgspec

from common.messages import Role

Dtype = Literal["bf16", "fp32"]
Weights = Literal["model", "int8", "w8a8"]
PrefillOrder = Literal["fcfs", "sjf", "ljf", "srpt"]
PrefillBatching = Literal["chunks", "saturation"]
PrefillPolicy = Literal[
    "round_robin", "least_outstanding", "shortest_queue", "token_jsq", "best_fit", "deferred"
]
DecodeBinding = Literal["early", "late"]
DecodePolicy = Literal["round_robin", "least_outstanding", "least_loaded", "power_of_two", "best_fit"]
DecodeAdmission = Literal["greedy", "reserve_static", "reserve_dynamic", "reserve_peak"]
PredictorKind = Literal["none", "history", "classifier", "oracle"]
AttentionPartition = Literal["heads", "requests"]
RolePolicyName = Literal["fixed", "overflow", "idle_flip"]
Kernels = Literal["auto", "torch"]
MixedPolicy = Literal["prefill_first", "chunked", "splitwise", "orca", "static"]
Pipeline = Literal["off", "fixed", "rotational"]
ScalingMode = Literal["off", "dry_run", "on"]
TransferPath = Literal["auto", "mooncake", "shared_memory"]
TransferMode = Literal["pull", "push"]
TransferProtocol = Literal["tcp", "rdma", "nvlink"]


class MeshConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What every service of one mesh agrees on.

    ``namespace`` begins all of its NATS subjects and Redis keys, so that several meshes can share the
    servers at ``nats_url`` and ``redis_url``. A member says every ``heartbeat_s`` that it lives, and counts
    for ``lease_s`` when it is silent. ``call_timeout_s`` bounds a call over NATS; ``drain_timeout_s`` what
    a service that is told to end waits for the requests it has.
    """

    namespace: str = "default"
    nats_url: str = "nats://127.0.0.1:4222"
    redis_url: str = "redis://127.0.0.1:6379/0"
    lease_s: float = 3.0
    heartbeat_s: float = 1.0
    call_timeout_s: float = 5.0
    drain_timeout_s: float = 30.0


class ServiceConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The HTTP side of one process. ``service_id`` None makes one from role and a random part.

    It listens at ``host``; ``port`` 0 asks the system for a free one. ``advertise_host`` is how others reach
    this machine.
    ``vllm_metrics`` adds to ``/metrics`` what it shows under vLLM's names (``common.vllm_metrics``).
    """

    service_id: str | None = None
    host: str = "127.0.0.1"
    port: int = 0
    advertise_host: str = "127.0.0.1"
    vllm_metrics: bool = False


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which model, and where converted weights and captured programs are kept.

    ``directory`` None is the embedded default model; conversions go into ``cache_directory``. ``dtype`` and
    ``weights``: see ``common.model.precision`` and ``common.model.linears``. ``device``: cpu, cuda or
    cuda:N. ``context_length`` None is the model's own. ``threads`` None uses the cores that no other
    instance of this machine uses at the time. ``kernels`` auto compiles them on a CPU where that is
    quicker (``common.model.cpu``) and replays short passes as graphs on CUDA
    (``common.model.step_graphs``); torch leaves everything to torch.
    """

    directory: Path | None = None
    cache_directory: Path = Path("~/.cache/lamella")
    dtype: Dtype = "bf16"
    device: str = "cpu"
    context_length: int | None = None
    weights: Weights = "model"
    threads: int | None = None
    kernels: Kernels = "auto"


class GatewayConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one client may ask for, and how long anybody waits.

    A request's body has at most ``max_body_bytes`` and asks for at most ``max_choices``, which end at one
    of at most ``max_stop_strings`` of ``max_stop_characters`` each. A gateway has at most
    ``max_open_requests`` choices open, and reads prompts in ``tokenizer_threads``. ``header_timeout_s``
    bounds a request's head, ``body_timeout_s`` its body, ``token_timeout_s`` the wait for a stream's next
    token, ``bus_timeout_s`` that for a bus that is away, ``slow_reader_timeout_s`` a client that takes
    nothing; ``keep_alive_comment_s`` of silence of a stream that has begun are bridged by an SSE comment. A
    request for which nobody is there, as the only instance of a role has died or no scheduler answers, asks
    again for ``wait_for_instance_s``; 0: it is refused at once. A sequence that breaks is continued at most
    ``max_continuations`` times in a row before it gets on. ``log_calls``: a line a call, or refusal, in the
    log, with ids, counts and times.

    ``private_port`` is for operators (``/ui``, ``/api``): 0, or one that is taken, is a free one instead. It
    listens at ``private_host`` only. ``admin_key_file`` holds the key that changes need, without it nobody
    makes any; ``api_keys_file`` the SHA-256 of the keys of which everything on the public port but health
    needs one, in hexadecimal digits, a line each. Without it that port is open.
    """

    private_host: str = "127.0.0.1"
    private_port: int = 0
    admin_key_file: Path | None = None
    api_keys_file: Path | None = None
    max_body_bytes: int = 1 << 20
    max_choices: int = 8
    max_stop_strings: int = 32
    max_stop_characters: int = 256
    max_open_requests: int = 2048
    tokenizer_threads: int = 2
    slow_reader_timeout_s: float = 30.0
    token_timeout_s: float = 600.0
    bus_timeout_s: float = 30.0
    wait_for_instance_s: float = 10.0
    keep_alive_comment_s: float = 15.0
    header_timeout_s: float = 10.0
    body_timeout_s: float = 30.0
    max_continuations: int = 3
    log_calls: bool = True


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``prefill_policy`` and ``decode_policy``: where requests go (``scheduler.policy.dispatch``).
    ``decode_binding``: whether a sequence's decode instance is chosen with its prefill instance, or once
    its prompt is computed (``scheduler.policy.decode_binding``). ``grouped``: each of several schedulers
    chooses among its own part of the instances first. ``decisions_kept``: how many of the newest placements
    can be explained afterwards; ``shadow_share``: of one core, for what the other policies would have done
    (``scheduler.regret``), 0: never. A request is refused where every prefill instance has over
    ``max_pending_prefill_tokens`` of prompts waiting, or these take it over ``max_prefill_wait_s`` by what
    it has learned of its chunks, or every decode instance has ``max_requests_per_decode``; and where
    ``dispatch_attempts`` instances, one after another, did not take it. With ``deferred`` at most
    ``max_deferred_requests`` wait at the scheduler, until fewer than ``bind_below_tokens`` of prompts wait
    at an instance.

    ``rebalance_decodes``: sequences leave an instance that is expected to run out of memory for one that
    keeps a fifth of its own to spare (``scheduler.policy.decode_rebalancing``), not to be preempted;
    instances look at it, too, and where it is off do not say who could leave. Nor do they say how much slack
    their sequences have where neither ``prefill_policy`` nor ``shadow_share`` has anybody ask for it."""

    prefill_policy: PrefillPolicy = "shortest_queue"
    decode_policy: DecodePolicy = "least_loaded"
    decode_binding: DecodeBinding = "early"
    grouped: bool = False
    decisions_kept: int = 4096
    shadow_share: float = 0.005
    max_pending_prefill_tokens: int = 65_536
    max_prefill_wait_s: float = 60.0
    max_requests_per_decode: int = 512
    max_deferred_requests: int = 1024
    bind_below_tokens: int = 512
    dispatch_attempts: int = 3
    rebalance_decodes: bool = True


class PredictorConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The length predictor beside the scheduler, by its ``kind``; none: the scheduler's own history says it
    all.

    ``directory`` holds the classifier's weights (``lamella predictor train``), ``lengths_file`` what the
    oracle knows. A prediction that takes longer than ``timeout_s`` is done without.
    """

    kind: PredictorKind = "none"
    directory: Path | None = None
    lengths_file: Path | None = None
    timeout_s: float = 2.0


class ObjectivesConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What users of one class of service are promised: ``ttft_s`` to the first token, ``tpot_s`` from token
    to token on average, and, if set, ``end_to_end_s`` to the end of the response (``common.latency``).
    Where prompts queue, a request of the class counts as having come ``head_start_s`` earlier than it did."""

    ttft_s: float = 2.0
    tpot_s: float = 0.2
    end_to_end_s: float | None = None
    head_start_s: float = 0.0


SERVICE_CLASSES = {
    "interactive": ObjectivesConfig(ttft_s=0.5, tpot_s=0.1, head_start_s=2.0),
    "batch": ObjectivesConfig(ttft_s=60.0, tpot_s=1.0, head_start_s=-10.0),
}


class RolesConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the leading scheduler changes instances' roles (``scheduler.policy.roles``). ``policy`` fixed:
    not at all. ``min_prefill`` and ``min_decode`` of each kind always stay.

    It looks every ``look_s``, and waits ``cool_down_s`` after a change. ``overflow``: over
    ``overflow_queue_s`` of prompts (``overflow_queue_tokens`` while nothing is known of times) or
    ``overflow_kv_share`` of decode's memory one of the other kind helps; it returns once these are under
    ``return_share`` of their bounds and its share of the work is done, or ``settle_s`` later, and belongs
    to the others after ``repurpose_s``. Where the last of a role has been gone for ``replace_after_s``, one
    of the other kind becomes mixed, be it the last, too. ``idle_flip``: one that worked for less than
    ``idle_share`` of ``idle_s`` flips while all of the other kind worked for at least ``loaded_share``.
    """

    policy: RolePolicyName = "fixed"
    look_s: float = 0.25
    cool_down_s: float = 2.0
    overflow_queue_s: float = 2.0
    overflow_queue_tokens: int = 8192
    overflow_kv_share: float = 0.9
    return_share: float = 0.5
    settle_s: float = 10.0
    repurpose_s: float = 300.0
    replace_after_s: float = 5.0
    idle_s: float = 60.0
    idle_share: float = 0.1
    loaded_share: float = 0.5
    min_prefill: int = 1
    min_decode: int = 1


class ScalingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the number of workers follows the load (``scheduler.policy.scaling``). ``policy`` on: `lamella
    up` carries out what the scheduler plans; dry_run: it only logs it, and `lamella
    autoscale` may carry it out.

    The workload is judged every ``window_s``. ``utilisation`` is how far a worker may be loaded on average.
    After a change the next one up comes ``up_cooldown_s`` later, unless the workload has jumped; one down
    only when for ``down_after_s`` fewer would have done, even at a rate higher by ``down_margin``. The plan
    keeps to the bounds ``min_gateway`` to ``max_gateway``, ``min_prefill`` to ``max_prefill``,
    ``min_decode`` to ``max_decode``, ``min_mixed`` to ``max_mixed`` and ``min_attention`` to
    ``max_attention``.
    """

    policy: ScalingMode = "off"
    window_s: float = 10.0
    utilisation: float = 0.7
    up_cooldown_s: float = 10.0
    down_after_s: float = 120.0
    down_margin: float = 0.15
    min_gateway: int = 1
    max_gateway: int = 1
    min_prefill: int = 1
    max_prefill: int = 4
    min_decode: int = 1
    max_decode: int = 4
    min_mixed: int = 1
    max_mixed: int = 4
    min_attention: int = 1
    max_attention: int = 4


class InstanceConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One instance: the ``role`` that it starts with, its KV pool, and how its two rooms batch.

    ``kv_bytes`` sizes the pool, ``block_size`` is tokens per block (1 = token granularity).
    ``chunk_tokens`` is TetriInfer's fixed ChunkSize (3.3.3), None: what `lamella profile` has found on this
    machine, or 512. ``prefill_batching`` chunks slices and merges prompts into those; saturation computes
    short prompts together until there are about so many tokens, L_m, and a longer one alone (DistServe
    4.3). ``prefill_order`` and ``scheduling_window`` are its PrefillSchedBatch policies (3.3.1); with
    ``srpt`` whoever has least left goes on at every chunk's end, and waiting counts as having
    ``prefill_aging_tokens_per_s`` less left. ``decode_admission`` is when decode takes one more sequence in
    (3.4), up to ``max_decode_batch`` in a step; where ``max_step_context_tokens`` says of how much context a
    step may be, sequences take turns (DistServe's simulator); None: any. Prefill refuses prompts over
    ``max_waiting_requests``. The load is reported at least every ``report_interval_s``; changes closer
    together than ``report_gap_s`` share a report. ``engine`` emulated replaces the model by a cost model
    (`[emulation]`).

    ``mixed_policy``: what a mixed instance computes where prompts and decodes wait
    (``scheduler.policy.mixed_batching``). prefill_first: prompts, for which decodes wait at most
    ``mixed_max_wait_s``; chunked: decodes, and in what they leave of ``chunk_tokens`` a chunk beside them;
    splitwise: prompts, and decodes where all of them fit beside these, or have sat out four passes;
    orca: decodes, and as many whole prompts as fit beside them there and in ``max_decode_batch``; static: a
    batch of prompts, with memory for all that they may draw, and no other until the last of it has ended.
    Under the last two a prompt longer than ``chunk_tokens`` is computed in one pass all the same.

    ``attention_workers`` is how many hold the KV of every decode instance and compute its attention; 0: it
    does so itself. ``attention_partition``: each has some KV heads of every sequence, or every head of some
    sequences (Lamina 2, section 5). ``attention_mini_batches``: a step's exchange in so many parts, so that
    one is on its way while another is computed (Lamina 1, 5.2.1). ``pipeline``: batches take turns, one
    computes its slices while another is at attention (Lamina 1, 5.1). ``staggered_batches`` n of them
    rotate over n − 1 model replicas, or are fixed, each on one of n. The replicas' devices are
    ``replica_devices``; none named: all on ``model.device``, with the same weights.

    ``attention_moves``: running sequences that go from one worker to another at once, 0: none ever does.
    For balance they do where the most context on one worker shrinks by ``attention_move_gain_tokens``.

    ``swap_bytes`` of the host's memory, page-locked beside a device, hold the KV of preempted sequences
    until there is room again, where that is cheaper than to compute it anew; at most as many as
    ``kv_bytes``, and none where attention workers hold the KV. 0: it always is computed anew.
    """

    role: Role = "prefill"
    kv_bytes: int = 1 << 30
    swap_bytes: int = 1 << 30
    block_size: int = 256
    chunk_tokens: int | None = None
    prefill_batching: PrefillBatching = "chunks"
    prefill_order: PrefillOrder = "fcfs"
    scheduling_window: int = 16
    prefill_aging_tokens_per_s: float = 200.0
    decode_admission: DecodeAdmission = "greedy"
    max_decode_batch: int = 64
    max_step_context_tokens: int | None = None
    mixed_policy: MixedPolicy = "chunked"
    mixed_max_wait_s: float = 1.0
    max_waiting_requests: int = 1024
    attention_workers: int = 0
    attention_partition: AttentionPartition = "heads"
    attention_mini_batches: int = 1
    attention_moves: int = 1
    attention_move_gain_tokens: int = 256
    pipeline: Pipeline = "off"
    staggered_batches: int = 2
    replica_devices: tuple[str, ...] = ()
    report_interval_s: float = 0.1
    report_gap_s: float = 0.02
    engine: Literal["model", "emulated"] = "model"


class AttentionConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An attention worker: ``kv_bytes`` of KV, shared out evenly among so many ``decode_instances``, and
    the most ``exchange_bytes`` through which one of these may ask it. The KV of instances that died is kept
    for a while beside that: at most as much again. ``device``: cpu, cuda or cuda:N, where the KV lies and
    attention over it is computed; what is exchanged with instances passes through the host's memory."""

    device: str = "cpu"
    kv_bytes: int = 1 << 30
    exchange_bytes: int = 64 << 20
    decode_instances: int = 1


class EmulationConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The emulated engine's cost model. A chunk takes ``prefill_base_s`` and for each token of it
    ``prefill_per_token_s``; a decode step ``decode_base_s``, for each sequence in it
    ``decode_per_sequence_s`` and for each token of their contexts ``decode_per_context_token_s``. A pass of
    both takes the longer one of the two fixed parts: it reads its weights once.

    ``total_blocks`` fixes the pool, since no bytes need to be held. It draws from ``vocab_size`` tokens,
    for contexts of up to ``context_length``.
    """

    prefill_base_s: float = 0.002
    prefill_per_token_s: float = 0.00005
    decode_base_s: float = 0.005
    decode_per_sequence_s: float = 0.0
    decode_per_context_token_s: float = 0.0
    total_blocks: int = 4096
    vocab_size: int = 49_152
    context_length: int = 8192


class TransferConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How KV moves. ``path`` auto picks shared memory on one host and Mooncake between hosts.

    ``emulated_bandwidth_bytes_per_s`` and ``emulated_latency_s`` slow a link down for experiments
    (TetriInfer 4). Mooncake speaks ``protocol`` and listens at ``host`` on two ports from ``min_port`` to
    ``max_port``. A transfer that takes longer than ``deadline_s`` is given up. Of one that has taken
    ``suspect_after_s`` its sender tells schedulers, which have others compute and decode, if there are any:
    let it be longer than what is sent at once takes, with push a whole prompt's KV.

    A prompt of at least ``layerwise_min_tokens`` hands its KV over layer by layer while it is computed
    (Splitwise 4.4); None: of as many as `lamella profile` has found that it pays from, or 512. While
    sequences are decoded, their instance pulls others' KV for ``pull_share`` of each step's time, or, where
    these are a larger share of its sequences, for theirs; None: 0.2 where a processor computes the model,
    else all of it. That is ``mode`` pull (DistServe 4.3). With push it asks once, for all, when it has room,
    and the prefill instance sends every part as soon as it is there (TetriInfer 3.3.4), however many do at
    once.
    """

    path: TransferPath = "auto"
    protocol: TransferProtocol = "tcp"
    host: str = "127.0.0.1"
    min_port: int = 20_000
    max_port: int = 32_000
    deadline_s: float = 60.0
    suspect_after_s: float = 2.0
    emulated_bandwidth_bytes_per_s: float | None = None
    emulated_latency_s: float = 0.0
    layerwise_min_tokens: int | None = None
    mode: TransferMode = "pull"
    pull_share: float | None = None


class TelemetryConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Traces for OpenTelemetry (``common.spans``). ``otlp_endpoint``: the base URL of a collector's OTLP over
    HTTP, None: no traces are made. Of the calls that come without a traceparent of their own
    ``sampled_share`` are traced; the others as theirs says."""

    otlp_endpoint: str | None = None
    sampled_share: float = 1.0


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A whole configuration file. ``objectives`` are of the class of service ``default``; the others are
    ``service_classes``, by name: a file that says any replaces those that are there by default."""

    mesh: MeshConfig = MeshConfig()
    service: ServiceConfig = ServiceConfig()
    model: ModelConfig = ModelConfig()
    gateway: GatewayConfig = GatewayConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    predictor: PredictorConfig = PredictorConfig()
    objectives: ObjectivesConfig = ObjectivesConfig()
    service_classes: dict[str, ObjectivesConfig] = msgspec.field(default_factory=SERVICE_CLASSES.copy)
    roles: RolesConfig = RolesConfig()
    scaling: ScalingConfig = ScalingConfig()
    instance: InstanceConfig = InstanceConfig()
    attention: AttentionConfig = AttentionConfig()
    emulation: EmulationConfig = EmulationConfig()
    transfer: TransferConfig = TransferConfig()
    telemetry: TelemetryConfig = TelemetryConfig()
