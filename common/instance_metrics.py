"""What an instance counts: both of its rooms, the KV pool that they share, and what moves in and out."""

from typing import Literal, get_args

from prometheus_client import CollectorRegistry

from common.latency import PREFILL_TIME, QUEUE_TIME, TRANSFER_TIME
from common.messages import LoadReport, Phase, Role
from common.telemetry import Instruments, LatencyHistogram, token_histogram

SwapDirection = Literal["out", "in"]
ROLES: tuple[Role, ...] = ("prefill", "decode", "mixed")
QUEUE_PHASES = ("prefill", "handover", "decode")
"""Placement is the schedulers'."""


class InstanceMetrics:
    """Prefill and decode rooms, the KV pool and its transfers."""

    def __init__(self, registry: CollectorRegistry) -> None:
        make = Instruments(registry)
        count, gauge = make.count, make.gauge
        self._queue = LatencyHistogram(QUEUE_TIME, registry, "phase", QUEUE_PHASES)
        self._transfer = LatencyHistogram(TRANSFER_TIME, registry)
        self._prefill_compute = LatencyHistogram(PREFILL_TIME, registry)
        self._pass_tokens = token_histogram(
            registry, "pass_tokens", "Tokens that a chunk, or a decode step, has computed.", ("phase",)
        )
        self._chunk_tokens = self._pass_tokens.labels("prefill")
        self._step_tokens = self._pass_tokens.labels("decode")
        self._prefill_tokens = count("prefill_tokens", "Prompt tokens computed.")
        self._prefill_chunks = count("prefill_chunks", "Chunks run.")
        self._chunk_s = count("prefill_busy_seconds", "Time the engine spent in chunks.")
        self._decode_tokens = count("decode_tokens", "Tokens drawn in decode steps.")
        self._decode_steps = count("decode_steps", "Decode steps run.")
        self._step_s = count("decode_busy_seconds", "Time the engine spent in decode steps.")
        self._wait_s = count(
            "pass_wait_seconds",
            "Time of passes in which the engine's thread did not run: it had no core, or waited for a device"
            " or for attention workers.",
        )
        self._gaps = count("pass_gaps", "Passes that followed on another one, without a pause.")
        self._gap_s = count(
            "pass_gap_seconds", "Time that the model rested before passes that followed on another one."
        )
        gap_tokens = count(
            "pass_gap_tokens", "Tokens drawn by passes that another one followed on, by phase.", "phase"
        )
        self._gap_prompts, self._gap_decodes = (gap_tokens.labels(phase) for phase in get_args(Phase))
        self._preemptions = count("preemptions", "Sequences that lost their blocks to older ones.")
        self._left = count("sequences_left", "Sequences that this instance passed on to another.")
        self._moves = count("moves", "Running sequences moved to another attention worker.")
        self._move_bytes = count("move_bytes", "KV bytes moved with them.")
        self._move_s = count("move_seconds", "Time that they stood still for it.")
        self._move_failures = count("move_failures", "Moves that failed.")
        self._swaps = count("swaps", "Sequences copied to the host tier or back.", "direction")
        self._swap_bytes = count("swap_bytes", "KV bytes copied with them.", "direction")
        self._swap_s = count("swap_seconds", "Time that copying them took.", "direction")
        for each in (self._swaps, self._swap_bytes, self._swap_s):
            for direction in get_args(SwapDirection):
                each.labels(direction)
        self._transfer_bytes = count("transfer_bytes", "KV bytes sent.")
        self._transfer_s = count("transfer_seconds", "Time spent sending KV.")
        self._transfer_failures = count("transfer_failures", "KV transfers that failed.")
        self._blocks = gauge("kv_blocks", "Blocks of the KV pool.", "state")
        self._block_tokens = gauge("kv_block_tokens", "Tokens that a block of the KV pool holds.")
        self._role = gauge("role", "1 for the role that the instance has now.", "role")
        self._running = gauge("requests_running", "Sequences in decode steps.")
        self._waiting = gauge("requests_waiting", "Waiting, by room.", "room")
        self._pending = gauge("pending_prefill_tokens", "Prompt tokens not yet computed.")
        self._length_error = gauge(
            "length_error_tokens", "By how much sequences that outlived their predictions are to exceed them."
        )
        self._batch_error = gauge("batch_error", "Sequences that outlived their predictions.")
        self._model_error = gauge(
            "performance_model_relative_error",
            "Of what was predicted of the newest steps' time, the mean.",
            "model",
        )

    def observe_prefill(self, queue_s: float, compute_s: float) -> None:
        self._queue.observe(queue_s, "prefill")
        self._prefill_compute.observe(compute_s)

    def observe_chunk(self, chunk_tokens: int, elapsed_s: float) -> None:
        self._prefill_chunks.inc()
        self._prefill_tokens.inc(chunk_tokens)
        self._chunk_tokens.observe(chunk_tokens)
        self._chunk_s.inc(elapsed_s)

    def observe_handover_queue(self, queue_s: float) -> None:
        self._queue.observe(queue_s, "handover")

    def observe_decode_queue(self, queue_s: float) -> None:
        self._queue.observe(queue_s, "decode")

    def observe_step(self, sequences: int, elapsed_s: float) -> None:
        self._decode_steps.inc()
        self._decode_tokens.inc(sequences)
        self._step_tokens.observe(sequences)
        self._step_s.inc(elapsed_s)

    def observe_wait(self, waited_s: float) -> None:
        """Of a pass (``shared_engine.PassClock``)."""
        self._wait_s.inc(waited_s)

    def observe_gap(self, gap_s: float, decodes: int, prompts: int) -> None:
        """Between two passes (``shared_engine.PassClock``), of which the first one has ``Drawn`` that."""
        self._gaps.inc()
        self._gap_s.inc(gap_s)
        self._gap_prompts.inc(prompts)
        self._gap_decodes.inc(decodes)

    def observe_transfer(self, kv_bytes: int, elapsed_s: float) -> None:
        self._transfer.observe(elapsed_s)
        self._transfer_bytes.inc(kv_bytes)
        self._transfer_s.inc(elapsed_s)

    def transfer_failed(self) -> None:
        self._transfer_failures.inc()

    def observe_move(self, kv_bytes: int, elapsed_s: float) -> None:
        self._moves.inc()
        self._move_bytes.inc(kv_bytes)
        self._move_s.inc(elapsed_s)

    def move_failed(self) -> None:
        self._move_failures.inc()

    def observe_swap(self, direction: SwapDirection, kv_bytes: int, elapsed_s: float) -> None:
        self._swaps.labels(direction).inc()
        self._swap_bytes.labels(direction).inc(kv_bytes)
        self._swap_s.labels(direction).inc(elapsed_s)

    def left(self) -> None:
        self._left.inc()

    def preempted(self, sequences: int) -> None:
        self._preemptions.inc(sequences)

    def observe_load(
        self, report: LoadReport, quarantined_blocks: int, leaked_blocks: int, block_tokens: int
    ) -> None:
        """``leaked_blocks`` are held for sequences that no room knows: none, unless there is a defect."""
        used = report.total_blocks - report.free_blocks - quarantined_blocks - leaked_blocks
        self._blocks.labels("free").set(report.free_blocks)
        self._blocks.labels("used").set(used)
        self._blocks.labels("quarantined").set(quarantined_blocks)
        self._blocks.labels("leaked").set(leaked_blocks)
        self._block_tokens.set(block_tokens)
        for role in ROLES:
            self._role.labels(role).set(role == report.role)
        self._running.set(report.decode_running)
        self._waiting.labels("prefill").set(report.pending_prefill_requests)
        self._waiting.labels("handover").set(report.handovers_waiting)
        self._waiting.labels("decode").set(report.decode_waiting)
        self._pending.set(report.pending_prefill_tokens)
        self._length_error.set(report.length_error_tokens)
        self._batch_error.set(report.batch_error)
        for model, fitted in (("chunk", report.chunk_time), ("step", report.step_time)):
            if fitted is not None:
                self._model_error.labels(model).set(fitted.relative_error)
