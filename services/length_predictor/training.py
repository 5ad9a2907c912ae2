"""Trains the length classifier on prompts and the lengths that a target model gave them (TetriInfer 3.3.2).

The prompts are split by their digest, so a prompt is on the same side in every run: held out, to judge by
alone; validation, which says which epoch was best; and the rest, to learn from.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from common.errors import ConfigError
from services.length_predictor.buckets import (
    GRANULARITIES,
    Accuracy,
    accuracy_of,
    bucket_of,
    commonest,
    mean_lengths,
)
from services.length_predictor.engine import ClassifierShape, LengthEncoder, as_batch
from services.length_predictor.oracle import digest_of

HELD_OUT, VALIDATION = 0.2, 0.15
"""Shares of all prompts."""
FEWEST = 20
LEARNING_RATE = 5e-4
WEIGHT_DECAY = 0.05
BATCH = 16


@dataclass(frozen=True, slots=True)
class Sample:
    prompt_ids: tuple[int, ...]
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Trained:
    """``confusion``: of the served granularity, on the held-out prompts: rows are the true buckets, columns
    the named ones. ``learned`` prompts were learned from, in ``best_epoch`` epochs."""

    encoder: LengthEncoder
    accuracies: tuple[Accuracy, ...]
    confusion: list[list[int]]
    learned: int
    best_epoch: int


@dataclass(frozen=True, slots=True)
class _Side:
    """One side of the split: its samples, and their buckets a granularity, [granularities, samples]."""

    samples: list[Sample]
    buckets: Tensor


def train(
    samples: Sequence[Sample],
    *,
    target: str,
    vocab_size: int,
    granularity: int,
    max_tokens: int,
    epochs: int,
    on_epoch: Callable[[int, float], None],
    seed: int = 0,
) -> Trained:
    """The encoder of the best epoch. ``target``: the model's identity. ``on_epoch``: epochs done, and the
    loss on the validation prompts.

    Raises ConfigError where there are too few samples.
    """
    learn, validate, judge = _split(samples, max_tokens)
    lengths = [sample.output_tokens for sample in learn.samples]
    shape = ClassifierShape(
        target=target,
        vocab_size=vocab_size,
        granularity=granularity,
        max_tokens=max_tokens,
        bucket_tokens=mean_lengths(lengths, granularity, max_tokens),
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        encoder = LengthEncoder(shape)
        optimizer = torch.optim.AdamW(encoder.parameters(), LEARNING_RATE, weight_decay=WEIGHT_DECAY)
        best, best_loss, best_epoch = encoder.state_dict(), float("inf"), 0
        for epoch in range(1, epochs + 1):
            _learn(encoder, optimizer, learn, generator)
            loss = _loss(_logits(encoder, validate), validate.buckets).item()
            if loss < best_loss:
                best, best_loss, best_epoch = copy.deepcopy(encoder.state_dict()), loss, epoch
            on_epoch(epoch, loss)
    encoder.load_state_dict(best)
    accuracies, confusion = _judge(encoder, learn, judge)
    return Trained(encoder, accuracies, confusion, len(learn.samples), best_epoch)


def _split(samples: Sequence[Sample], max_tokens: int) -> tuple[_Side, _Side, _Side]:
    """To learn from, to validate, to judge by. Prompts of one digest are one."""
    unique = {digest_of(sample.prompt_ids): sample for sample in samples}
    if len(unique) < FEWEST:
        raise ConfigError(
            "--prompts", len(unique), f"must be at least {FEWEST} different prompts with a length"
        )
    ordered = [unique[digest] for digest in sorted(unique)]
    held_out, validation = round(HELD_OUT * len(ordered)), round(VALIDATION * len(ordered))
    parts = ordered[held_out + validation :], ordered[held_out:][:validation], ordered[:held_out]
    learn, validate, judge = (_Side(part, _buckets(part, max_tokens)) for part in parts)
    return learn, validate, judge


def _buckets(samples: Sequence[Sample], max_tokens: int) -> Tensor:
    return torch.tensor(
        [[bucket_of(each.output_tokens, wide, max_tokens) for each in samples] for wide in GRANULARITIES]
    )


def _learn(
    encoder: LengthEncoder, optimizer: torch.optim.Optimizer, side: _Side, generator: torch.Generator
) -> None:
    """One epoch, in batches of a new order."""
    encoder.train()
    order = torch.randperm(len(side.samples), generator=generator)
    for start in range(0, len(order), BATCH):
        rows = order[start : start + BATCH]
        prompts = [side.samples[row].prompt_ids for row in rows.tolist()]
        loss = _loss(encoder(*as_batch(encoder.shape, prompts)), side.buckets[:, rows])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch does not type it
        optimizer.step()


def _loss(logits: Sequence[Tensor], buckets: Tensor) -> Tensor:
    """The sum over the granularities, of the mean over the prompts."""
    return torch.stack(
        [cross_entropy(each, truth) for each, truth in zip(logits, buckets, strict=True)]
    ).sum()


@torch.inference_mode()
def _logits(encoder: LengthEncoder, side: _Side) -> list[Tensor]:
    """A granularity: [samples, buckets]."""
    encoder.eval()
    parts = []
    for start in range(0, len(side.samples), BATCH):
        prompts = [sample.prompt_ids for sample in side.samples[start : start + BATCH]]
        parts.append(encoder(*as_batch(encoder.shape, prompts)))
    return [torch.cat(part) for part in zip(*parts, strict=True)]


def _judge(
    encoder: LengthEncoder, learn: _Side, judge: _Side
) -> tuple[tuple[Accuracy, ...], list[list[int]]]:
    """By prompts that had no say in what was learned, nor in when it was enough."""
    accuracies, confusion = [], []
    for index, (wide, logits) in enumerate(zip(GRANULARITIES, _logits(encoder, judge), strict=True)):
        truth, named = judge.buckets[index].tolist(), logits.argmax(1).tolist()
        usual = commonest(learn.buckets[index].tolist())
        accuracies.append(accuracy_of(wide, truth, named, usual))
        if wide == encoder.shape.granularity:
            confusion = [[0] * logits.shape[1] for _ in range(logits.shape[1])]
            for true_bucket, named_bucket in zip(truth, named, strict=True):
                confusion[true_bucket][named_bucket] += 1
    return tuple(accuracies), confusion
