"""From logits to tokens, for a whole batch at once.

The draw is keyed by ``(seed, output position)`` alone: one uniform number per row from a counter-based
generator, then the inverse of the cumulative distribution over the vocabulary in token order. So it depends
neither on who else is in the batch nor on where the sequence ran before. Order of the filters, as vLLM's:
penalties and bias, temperature, top-k, top-p, min-p. Log-probabilities are of the model's raw logits.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from common.messages import SampledToken, SamplingParams

COLDEST = 1e-6
"""Temperatures below it draw as this one does: the largest logit, or one of its equals."""

GOLDEN_GAMMA = 0x9E3779B97F4A7C15
MASK_64 = 0xFFFFFFFFFFFFFFFF
LIKELIEST = 2048
"""So many tokens of a row are looked at first; all of them where top-p reaches further."""


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """One row of the batch. ``output_ids`` are the tokens so far; their number is the position drawn."""

    params: SamplingParams
    prompt_ids: Sequence[int]
    output_ids: Sequence[int]
    eos_token_ids: Collection[int]

    @property
    def is_ending_forbidden(self) -> bool:
        return len(self.output_ids) < self.params.min_tokens

    @property
    def has_penalty(self) -> bool:
        params = self.params
        return (
            params.repetition_penalty != 1.0
            or params.presence_penalty != 0.0
            or params.frequency_penalty != 0.0
        )


def sample(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[SampledToken]:
    """One token per row of ``logits`` ``[rows, vocab]``. Raises ValueError when the counts differ."""
    if logits.shape[0] != len(rows):
        raise ValueError(f"{logits.shape[0]} rows of logits for {len(rows)} sequences")
    shaped = _shape(logits, rows)
    token_ids = shaped.max(dim=-1).indices  # as argmax, which takes five times as long over bf16
    random_rows = [index for index, row in enumerate(rows) if row.params.temperature > 0]
    if random_rows:
        token_ids[random_rows] = _draw(shaped[random_rows], [rows[index] for index in random_rows])
    tokens = [SampledToken(token_id) for token_id in token_ids.tolist()]
    reported = [index for index, row in enumerate(rows) if row.params.logprobs is not None]
    if reported:
        _report_logprobs(logits, rows, reported, tokens)
    return tokens


def uniform(seed: int, position: int) -> float:
    """The number in [0, 1) that belongs to a seed and a position: splitmix64 over both, 53 bits."""
    state = _mix(_mix(seed & MASK_64) ^ ((position * GOLDEN_GAMMA) & MASK_64))
    return (state >> 11) / (1 << 53)


def _mix(value: int) -> int:
    value = (value + GOLDEN_GAMMA) & MASK_64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK_64
    return value ^ (value >> 31)


def _shape(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """Bias, penalties and forbidden endings. ``logits`` itself is returned where nobody asked for any."""
    touched = [
        index
        for index, row in enumerate(rows)
        if row.has_penalty or row.params.logit_bias or row.is_ending_forbidden
    ]
    if not touched:
        return logits
    shaped = logits.to(torch.float32, copy=True)
    for index in touched:
        row = rows[index]
        if row.has_penalty:
            _penalize(shaped[index], row)
        if row.params.logit_bias:
            ids, biases = zip(*row.params.logit_bias.items(), strict=True)
            shaped[index, list(ids)] += torch.tensor(biases, dtype=shaped.dtype, device=shaped.device)
        if row.is_ending_forbidden:
            endings = {*row.eos_token_ids, *row.params.stop_token_ids}
            shaped[index, sorted(endings)] = float("-inf")
    return shaped


def _penalize(logits: torch.Tensor, row: SamplingRow) -> None:
    """In place, ``[vocab]``. Repetition counts prompt and output (CTRL's rule), the others output only."""
    params = row.params
    output = torch.tensor(row.output_ids, dtype=torch.int64, device=logits.device)
    if params.repetition_penalty != 1.0:
        prompt = torch.tensor(row.prompt_ids, dtype=torch.int64, device=logits.device)
        seen = torch.unique(torch.cat([prompt, output]))
        values = logits[seen]
        penalty = params.repetition_penalty
        logits[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if len(row.output_ids) > 0:
        ids, counts = torch.unique(output, return_counts=True)
        logits[ids] -= params.presence_penalty + params.frequency_penalty * counts.to(logits.dtype)


def _draw(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """Token ids ``[rows]`` drawn from the tempered and filtered distributions."""
    params = [row.params for row in rows]
    device = logits.device
    temperatures = torch.tensor([each.temperature for each in params], dtype=torch.float32, device=device)
    # From the largest down, and no closer to 0: neither may overflow.
    raw = logits.float()
    scaled = (raw - raw.amax(dim=-1, keepdim=True)) / temperatures.clamp_(min=COLDEST)[:, None]
    draws = [uniform(row.params.seed, len(row.output_ids)) for row in rows]
    points = torch.tensor(draws, dtype=torch.float64, device=device)
    filtered = [
        index for index, each in enumerate(params) if each.top_k > 0 or each.top_p < 1 or each.min_p > 0
    ]
    weights = scaled.softmax(dim=-1)
    if filtered:
        weights[filtered] = _filter(weights[filtered], [params[index] for index in filtered])
    return _invert(weights, points)


def _invert(weights: torch.Tensor, points: torch.Tensor) -> torch.Tensor:
    """``weights`` [rows, n] ≥ 0, ``points`` [rows] in [0, 1) → the indices [rows] where they fall."""
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    # Kept below the total, where rounding would otherwise choose past the last weight.
    targets = torch.minimum(points[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    indices = torch.searchsorted(cumulative, targets, right=True).squeeze(-1)
    return indices.clamp_(max=weights.shape[-1] - 1)


def _filter(probabilities: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """``[rows, vocab]``, 0 outside top-k, top-p within it, and min-p; ties with the last token stay."""
    ascending = _sorted(probabilities)
    vocab, device = ascending.shape[-1], ascending.device
    top_k = torch.tensor([min(each.top_k, vocab) or vocab for each in params], device=device)[:, None]
    top_p = torch.tensor([each.top_p for each in params], dtype=torch.float64, device=device)[:, None]
    min_p = torch.tensor([each.min_p for each in params], dtype=torch.float32, device=device)[:, None]
    floor, is_settled = _least_kept(ascending[:, -LIKELIEST:].flip(-1), top_k, top_p)
    if not is_settled:
        floor, _ = _least_kept(ascending.flip(-1), top_k, top_p)
    floor = torch.maximum(floor, min_p * ascending[:, -1:])
    return probabilities * (probabilities >= floor)


def _least_kept(ordered: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> tuple[torch.Tensor, bool]:
    """The smallest probability [rows, 1] that top-k and top-p keep, if it is among ``ordered`` [rows, n].

    ``ordered`` are the n likeliest, largest first. The second answer: for every row it is.
    """
    looked_at = ordered.shape[-1]
    within_k = ordered.masked_fill(torch.arange(looked_at, device=ordered.device) >= top_k, 0.0)
    cumulative = within_k.cumsum(dim=-1, dtype=torch.float64)
    mass = torch.where(top_k <= looked_at, cumulative[:, -1:], 1.0)
    kept = (cumulative - within_k < top_p * mass).sum(dim=-1, keepdim=True)
    is_settled = bool(((kept < looked_at) | (top_k <= looked_at)).all())
    last = torch.minimum(kept.clamp_(min=1), top_k) - 1
    return ordered.gather(-1, last), is_settled


def _sorted(values: torch.Tensor) -> torch.Tensor:
    """Each row's values, smallest first. numpy's sort of values is 20 times torch's sort with indices."""
    if values.device.type == "cpu":
        return torch.from_numpy(np.sort(values.numpy(), axis=-1))
    return values.sort(dim=-1).values


def _report_logprobs(
    logits: torch.Tensor, rows: Sequence[SamplingRow], reported: Sequence[int], tokens: list[SampledToken]
) -> None:
    """Replaces the reported rows' tokens by ones that carry log-probabilities of the raw logits."""
    logprobs = logits[list(reported)].float().log_softmax(dim=-1)
    most = max(rows[index].params.logprobs or 0 for index in reported)
    values, ids = logprobs.topk(min(most, logprobs.shape[-1]), dim=-1)
    for line, index in enumerate(reported):
        token_id = tokens[index].token_id
        count = rows[index].params.logprobs or 0
        top = tuple(zip(ids[line, :count].tolist(), values[line, :count].tolist(), strict=True))
        tokens[index] = SampledToken(token_id, float(logprobs[line, token_id]), top)
