"""The length classifier: a small transformer encoder over a prompt's two ends (TetriInfer 3.3.2).

Token embeddings (the target's own, where it has them: ``embeddings``) with positions counted from the end of
the prompt, an encoder layer or more, the mean over the tokens beside the logarithm of the prompt's whole
length, and a linear head a granularity, which learn together. One head is served. Weights are safetensors,
what they mean is JSON beside them.
"""

import math
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from common.errors import ConfigError, InvalidRequest
from common.lengths import LengthDistribution
from services.length_predictor.buckets import GRANULARITIES, buckets_for

WEIGHTS_FILE, SHAPE_FILE = "predictor.safetensors", "predictor.json"
WIDTH = 64
LEAST_PROBABILITY = 1e-4
"""A bucket that is less likely is left out of an answer."""


class ClassifierShape(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``window``: how many tokens of a longer prompt are read, half of them its first and half its last: the
    task stands before or behind what it is about. ``max_tokens``: the longest output that was
    looked at. ``bucket_tokens``: the mean output in each bucket of the served ``granularity``. ``target``:
    whose outputs they were (``services.model_directory.model_identity``)."""

    target: str
    vocab_size: int
    granularity: int
    max_tokens: int
    bucket_tokens: tuple[float, ...]
    granularities: tuple[int, ...] = GRANULARITIES
    width: int = WIDTH
    layers: int = 1
    heads: int = 4
    window: int = 256
    dropout: float = 0.2


class LengthEncoder(nn.Module):
    """``embeddings`` [vocab_size, width] are the target's, and stay as they are; without them the encoder
    learns its own."""

    def __init__(self, shape: ClassifierShape, embeddings: Tensor | None = None) -> None:
        super().__init__()
        self.shape = shape
        # One more than there are tokens: what fills shorter prompts up.
        self.tokens = nn.Embedding(shape.vocab_size + 1, shape.width, padding_idx=shape.vocab_size)
        if embeddings is not None:
            with torch.no_grad():
                self.tokens.weight[:-1] = embeddings
            self.tokens.weight.requires_grad_(False)
        self.positions = nn.Embedding(shape.window, shape.width)
        # Beside embeddings of deviation 1: a word says more than where it stands.
        nn.init.normal_(self.positions.weight, std=0.1)
        # Dropout only before the heads: within a layer it took three quarters of an epoch's time.
        layer = nn.TransformerEncoderLayer(
            shape.width, shape.heads, 2 * shape.width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, shape.layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(shape.width)
        self.dropout = nn.Dropout(shape.dropout)
        self.heads = nn.ModuleList(
            nn.Linear(shape.width + 1, buckets_for(each, shape.max_tokens)) for each in shape.granularities
        )

    def forward(self, token_ids: Tensor, prompt_tokens: Tensor) -> list[Tensor]:
        """``token_ids`` [prompts, window or less], right-aligned; ``prompt_tokens`` [prompts], of the whole
        prompts. Logits a granularity: [prompts, buckets]."""
        is_filling = token_ids == self.shape.vocab_size
        from_end = torch.arange(token_ids.shape[1] - 1, -1, -1, device=token_ids.device)
        states = self.tokens(token_ids) + self.positions(from_end)
        states = self.norm(self.encoder(states, src_key_padding_mask=is_filling))
        weight = (~is_filling).unsqueeze(-1).to(states.dtype)
        mean = (states * weight).sum(1) / weight.sum(1)
        length = (prompt_tokens.to(states.dtype).log2() / 8.0).unsqueeze(-1)
        pooled = torch.cat((self.dropout(mean), length), dim=-1)
        return [head(pooled) for head in self.heads]


def as_batch(shape: ClassifierShape, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """What ``LengthEncoder.forward`` takes. Raises InvalidRequest for a token the encoder does not know."""
    windows = [_ends(prompt, shape.window) for prompt in prompts]
    width = max(map(len, windows))
    if width == 0 or any(max(window, default=shape.vocab_size) >= shape.vocab_size for window in windows):
        raise InvalidRequest(
            f"the length classifier knows tokens below {shape.vocab_size}: it was trained for another model"
        )
    rows = [[shape.vocab_size] * (width - len(window)) + [*window] for window in windows]
    return torch.tensor(rows), torch.tensor([len(prompt) for prompt in prompts])


def _ends(prompt: Sequence[int], window: int) -> Sequence[int]:
    """All of a prompt that is no longer than the window; else its first and its last tokens, half of each."""
    if len(prompt) <= window:
        return prompt
    first = window // 2
    return [*prompt[:first], *prompt[first - window :]]


class LengthClassifier:
    """A trained encoder that answers. Not to be used by two threads at once."""

    def __init__(self, encoder: LengthEncoder) -> None:
        self.encoder = encoder.eval()
        self._head = encoder.shape.granularities.index(encoder.shape.granularity)

    @torch.inference_mode()
    def predict(self, prompt_ids: Sequence[int]) -> LengthDistribution:
        """A point a bucket that is likely at all. Raises InvalidRequest."""
        shape = self.encoder.shape
        logits = self.encoder(*as_batch(shape, [prompt_ids]))[self._head][0]
        likely = [
            (tokens, probability)
            for tokens, probability in zip(shape.bucket_tokens, logits.softmax(0).tolist(), strict=True)
            if probability >= LEAST_PROBABILITY
        ]
        whole = math.fsum(probability for _, probability in likely)
        return LengthDistribution(tuple((tokens, probability / whole) for tokens, probability in likely))


def save_encoder(encoder: LengthEncoder, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    save_file(encoder.state_dict(), directory / WEIGHTS_FILE)
    (directory / SHAPE_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(encoder.shape)))


def load_classifier(directory: Path, served: str, key: str = "predictor.directory") -> LengthClassifier:
    """Raises ConfigError for a directory that holds no trained classifier, or one of another model than is
    ``served``."""
    try:
        shape = msgspec.json.decode((directory / SHAPE_FILE).read_bytes(), type=ClassifierShape)
        encoder = LengthEncoder(shape)
        encoder.load_state_dict(load_file(directory / WEIGHTS_FILE))
    except (OSError, msgspec.DecodeError, SafetensorError, RuntimeError, ValueError) as exc:
        reason = str(exc).splitlines()[0]
        raise ConfigError(key, str(directory), f"holds no trained length classifier: {reason}") from exc
    if shape.granularity not in shape.granularities or len(shape.bucket_tokens) != buckets_for(
        shape.granularity, shape.max_tokens
    ):
        raise ConfigError(key, str(directory), f"{SHAPE_FILE} does not fit itself: its buckets")
    if shape.target != served:
        rule = f"was trained on the outputs of {shape.target}, and {served} is served: train one for it"
        raise ConfigError(key, str(directory), rule)
    return LengthClassifier(encoder)
