"""From logits to tokens, for a whole batch at once.

The draw is keyed by ``(seed, output position)`` alone: one uniform number per row from a counter-based
generator, then the inverse of the cumulative distribution over the vocabulary in token order. So it depends
neither on who else is in the batch nor on where the sequence ran before. Order of the filters, as vLLM's:
penalties and bias, temperature, top-k, top-p, min-p. Log-probabilities are of the model's raw logits.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from common.messages import SampledToken, SamplingParams

GOLDEN_GAMMA = 0x9E3779B97F4A7C15
MASK_64 = 0xFFFFFFFFFFFFFFFF
CANDIDATES = 512


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
    token_ids = shaped.argmax(dim=-1)
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
    shaped = logits.float().clone() if logits.dtype != torch.float32 else logits.clone()
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
    temperatures = torch.tensor([each.temperature for each in params], dtype=torch.float64, device=device)
    scaled = logits.double() / temperatures[:, None]
    filtered = [
        index for index, each in enumerate(params) if each.top_k > 0 or each.top_p < 1 or each.min_p > 0
    ]
    if filtered:
        scaled[filtered] = _filter(scaled[filtered], [params[index] for index in filtered])
    cumulative = scaled.softmax(dim=-1).cumsum(dim=-1)
    draws = [uniform(row.params.seed, len(row.output_ids)) for row in rows]
    points = torch.tensor(draws, dtype=torch.float64, device=device)[:, None] * cumulative[:, -1:]
    chosen = torch.searchsorted(cumulative, points, right=True).squeeze(-1)
    return chosen.clamp_(max=logits.shape[-1] - 1)


def _filter(scaled: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Top-k, then top-p within it, then min-p: what falls outside becomes -inf, the likeliest stays.

    Sorting a whole vocabulary costs more than the model's last layer, so the likeliest ``CANDIDATES`` are
    looked at first, and all of them only where those do not settle every row.
    """
    vocab = scaled.shape[-1]
    largest_k = max((each.top_k for each in params if each.top_k), default=0)
    candidates = min(vocab, max(CANDIDATES, largest_k))
    filtered, is_settled = _filter_candidates(scaled, params, candidates)
    return filtered if is_settled or candidates == vocab else _filter_candidates(scaled, params, vocab)[0]


def _filter_candidates(
    scaled: torch.Tensor, params: Sequence[SamplingParams], candidates: int
) -> tuple[torch.Tensor, bool]:
    """Filters the likeliest ``candidates``; the second answer: nobody outside them could have stayed."""
    device = scaled.device
    ordered, order = scaled.topk(candidates, dim=-1)
    ranks = torch.arange(candidates, device=device)
    top_k = torch.tensor([each.top_k or scaled.shape[-1] for each in params], device=device)
    is_past_k = ranks >= top_k[:, None]
    # Top-p counts the mass of what top-k left; without top-k that is the whole vocabulary's.
    mass = torch.where(
        top_k <= candidates,
        ordered.masked_fill(is_past_k, float("-inf")).logsumexp(dim=-1),
        scaled.logsumexp(dim=-1),
    )
    probabilities = (ordered - mass[:, None]).exp().masked_fill(is_past_k, 0.0)
    before = probabilities.cumsum(dim=-1) - probabilities
    top_p = torch.tensor([each.top_p for each in params], dtype=scaled.dtype, device=device)
    min_p = torch.tensor([each.min_p for each in params], dtype=scaled.dtype, device=device)
    is_outside = (
        is_past_k | (before >= top_p[:, None]) | (probabilities < min_p[:, None] * probabilities[:, :1])
    )
    is_outside[:, 0] = False
    filtered = torch.full_like(scaled, float("-inf"))
    filtered.scatter_(-1, order, ordered.masked_fill(is_outside, float("-inf")))
    return filtered, bool(is_outside[:, -1].all())


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
