"""Trains the length classifier on prompts and the lengths that a target model gave them (TetriInfer 3.3.2).

It is trained ``FOLDS`` times to be judged: each time another part of the prompts is held out, so that every
prompt is judged once, by a classifier that has not seen it. Each of these trainings keeps a few of its
prompts back as validation, which says when it was enough. Once more, on all prompts and for as many epochs as
was enough in the middle one of those, it is trained to be served. The parts go by the prompts' digests, and
are the same in every run.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

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

FOLDS = 5
TRAININGS = FOLDS + 1
VALIDATION = 0.15
"""Share of the prompts that a training to be judged has."""
FEWEST = 20
LEARNING_RATE = 2e-3
WEIGHT_DECAY = 0.05
BATCH = 8
PATIENCE = 6
"""Epochs without a smaller loss on the validation prompts, after which there will be none."""
SORTED_BATCHES = 16
"""In so many batches at once prompts are put together by length, so that little is filled up."""


@dataclass(frozen=True, slots=True)
class Sample:
    prompt_ids: tuple[int, ...]
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Trained:
    """``confusion``: of the served granularity, on all prompts, each held out once: rows are the true
    buckets, columns the named ones. ``encoder`` learned from ``learned`` prompts in ``epochs``."""

    encoder: LengthEncoder
    accuracies: tuple[Accuracy, ...]
    confusion: list[list[int]]
    learned: int
    epochs: int


@dataclass(frozen=True, slots=True)
class _Side:
    """One side of a split: its samples, and their buckets a granularity, [granularities, samples]."""

    samples: list[Sample]
    buckets: Tensor


@dataclass(frozen=True, slots=True)
class Recipe:
    """What all trainings have in common. ``target``: the model's identity; ``embeddings``: its own, as
    ``LengthEncoder`` takes them. ``epochs``: at most."""

    target: str
    vocab_size: int
    granularity: int
    max_tokens: int
    epochs: int
    embeddings: Tensor | None = None
    seed: int = 0


def train(
    samples: Sequence[Sample], recipe: Recipe, on_epoch: Callable[[int, float], None] = lambda *_: None
) -> Trained:
    """``on_epoch``: which epoch of ``TRAININGS * recipe.epochs`` is done (one that was enough early skips
    some), and the loss on the validation prompts, at last on those learned from.

    Raises ConfigError where there are too few samples.
    """
    unique = {digest_of(sample.prompt_ids): sample for sample in samples}
    if len(unique) < FEWEST:
        raise ConfigError(
            "--prompts", len(unique), f"must be at least {FEWEST} different prompts with a length"
        )
    ordered = [unique[digest] for digest in sorted(unique)]
    judged: list[_Judged] = []
    enough: list[int] = []
    for fold in range(FOLDS):
        rest = [sample for place, sample in enumerate(ordered) if place % FOLDS != fold]
        encoder, best_epoch = _train_until_enough(rest, recipe, _from(fold * recipe.epochs, on_epoch))
        judged.append(_judge(encoder, rest, ordered[fold::FOLDS]))
        enough.append(best_epoch)
    epochs = sorted(enough)[FOLDS // 2]
    encoder = _train_for(epochs, ordered, recipe, _from(FOLDS * recipe.epochs, on_epoch))
    accuracies, confusion = _summed_up(judged, encoder.shape)
    return Trained(encoder, accuracies, confusion, len(ordered), epochs)


def _from(epochs_before: int, on_epoch: Callable[[int, float], None]) -> Callable[[int, float], None]:
    return lambda epoch, loss: on_epoch(epochs_before + epoch, loss)


def _train_until_enough(
    samples: Sequence[Sample], recipe: Recipe, on_epoch: Callable[[int, float], None]
) -> tuple[LengthEncoder, int]:
    """The encoder of the best epoch, and which that was."""
    kept_back = round(VALIDATION * len(samples))
    validate = _side(samples[:kept_back], recipe.max_tokens)
    best: dict[str, Tensor] = {}
    best_loss, best_epoch = float("inf"), 0
    for epoch, encoder in _epochs(samples[kept_back:], samples, recipe):
        loss = _loss(_logits(encoder, validate.samples), validate.buckets).item()
        on_epoch(epoch, loss)
        if loss < best_loss:
            best, best_loss, best_epoch = copy.deepcopy(encoder.state_dict()), loss, epoch
        elif epoch - best_epoch >= PATIENCE:
            break
    encoder.load_state_dict(best)
    return encoder, best_epoch


def _train_for(
    epochs: int, samples: Sequence[Sample], recipe: Recipe, on_epoch: Callable[[int, float], None]
) -> LengthEncoder:
    learned = _side(samples, recipe.max_tokens)
    for epoch, encoder in _epochs(samples, samples, replace(recipe, epochs=epochs)):
        on_epoch(epoch, _loss(_logits(encoder, samples), learned.buckets).item())
    return encoder


def _epochs(
    learn: Sequence[Sample], samples: Sequence[Sample], recipe: Recipe
) -> Iterator[tuple[int, LengthEncoder]]:
    """An encoder that has learned from ``learn`` for one epoch more each time. ``samples``: all that say how
    long the outputs in a bucket are."""
    side = _side(learn, recipe.max_tokens)
    lengths = [sample.output_tokens for sample in samples]
    shape = ClassifierShape(
        target=recipe.target,
        vocab_size=recipe.vocab_size,
        granularity=recipe.granularity,
        max_tokens=recipe.max_tokens,
        bucket_tokens=mean_lengths(lengths, recipe.granularity, recipe.max_tokens),
    )
    generator = torch.Generator().manual_seed(recipe.seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        encoder = LengthEncoder(shape, recipe.embeddings)
        learning = [each for each in encoder.parameters() if each.requires_grad]
        optimizer = torch.optim.AdamW(learning, LEARNING_RATE, weight_decay=WEIGHT_DECAY)
        for epoch in range(1, recipe.epochs + 1):
            _learn(encoder, optimizer, side, generator)
            yield epoch, encoder


def _side(samples: Sequence[Sample], max_tokens: int) -> _Side:
    buckets = [
        [bucket_of(each.output_tokens, wide, max_tokens) for each in samples] for wide in GRANULARITIES
    ]
    return _Side(list(samples), torch.tensor(buckets))


def _learn(
    encoder: LengthEncoder, optimizer: torch.optim.Optimizer, side: _Side, generator: torch.Generator
) -> None:
    """One epoch, in batches of a new order."""
    encoder.train()
    for rows in _batches(side.samples, generator):
        prompts = [side.samples[row].prompt_ids for row in rows]
        loss = _loss(encoder(*as_batch(encoder.shape, prompts)), side.buckets[:, rows])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch does not type it
        optimizer.step()


def _batches(samples: Sequence[Sample], generator: torch.Generator) -> Iterator[list[int]]:
    """Rows of ``samples``, each in one batch."""
    order = torch.randperm(len(samples), generator=generator).tolist()
    batches = []
    for start in range(0, len(order), SORTED_BATCHES * BATCH):
        alike = sorted(
            order[start : start + SORTED_BATCHES * BATCH], key=lambda row: len(samples[row].prompt_ids)
        )
        batches += [alike[first : first + BATCH] for first in range(0, len(alike), BATCH)]
    for place in torch.randperm(len(batches), generator=generator).tolist():
        yield batches[place]


def _loss(logits: Sequence[Tensor], buckets: Tensor) -> Tensor:
    """The sum over the granularities, of the mean over the prompts."""
    return torch.stack(
        [cross_entropy(each, truth) for each, truth in zip(logits, buckets, strict=True)]
    ).sum()


@torch.inference_mode()
def _logits(encoder: LengthEncoder, samples: Sequence[Sample]) -> list[Tensor]:
    """A granularity: [samples, buckets]."""
    encoder.eval()
    order = sorted(range(len(samples)), key=lambda row: len(samples[row].prompt_ids))
    parts = []
    for start in range(0, len(order), BATCH):
        prompts = [samples[row].prompt_ids for row in order[start : start + BATCH]]
        parts.append(encoder(*as_batch(encoder.shape, prompts)))
    in_place = torch.tensor(order).argsort()
    return [torch.cat(part)[in_place] for part in zip(*parts, strict=True)]


@dataclass(frozen=True, slots=True)
class _Judged:
    """One fold, a granularity each: the true buckets, the named ones, and the commonest of those that were
    learned from."""

    truth: list[list[int]]
    named: list[list[int]]
    commonest: list[int]


def _judge(encoder: LengthEncoder, rest: Sequence[Sample], held_out: Sequence[Sample]) -> _Judged:
    max_tokens = encoder.shape.max_tokens
    truth = _side(held_out, max_tokens).buckets.tolist()
    named = [logits.argmax(1).tolist() for logits in _logits(encoder, held_out)]
    return _Judged(truth, named, [commonest(each) for each in _side(rest, max_tokens).buckets.tolist()])


def _summed_up(
    folds: Sequence[_Judged], shape: ClassifierShape
) -> tuple[tuple[Accuracy, ...], list[list[int]]]:
    accuracies, confusion = [], []
    for index, wide in enumerate(GRANULARITIES):
        truth = [bucket for fold in folds for bucket in fold.truth[index]]
        named = [bucket for fold in folds for bucket in fold.named[index]]
        usual = [fold.commonest[index] for fold in folds for _ in fold.truth[index]]
        accuracies.append(accuracy_of(wide, truth, named, usual))
        if wide == shape.granularity:
            confusion = [[0] * len(shape.bucket_tokens) for _ in shape.bucket_tokens]
            for true_bucket, named_bucket in zip(truth, named, strict=True):
                confusion[true_bucket][named_bucket] += 1
    return tuple(accuracies), confusion
