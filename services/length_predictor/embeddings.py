"""What the target model itself holds of its tokens' meaning, for a classifier that sees few prompts.

A few hundred prompts name a few thousand of a vocabulary's words: to learn from those what the others mean is
hopeless. The target has learned it already. Its own token embeddings are laid onto their principal axes, as
many as the classifier is wide, and are not trained on: words that the target uses alike are alike from the
start.
"""

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from common.errors import ModelError
from common.spec import weight_files

NAMES = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")
"""How token embeddings end where they are called; what a checkpoint puts in front differs."""


def token_embeddings(directory: Path, vocab_size: int, width: int) -> Tensor | None:
    """[vocab_size, width], of deviation 1; None where the directory holds no embeddings so large."""
    whole = _read(directory)
    if whole is None or whole.shape[0] < vocab_size or whole.shape[1] < width:
        return None
    centred = whole[:vocab_size].float()
    centred -= centred.mean(0)
    # In order of their eigenvalues, the largest last.
    axes = torch.linalg.eigh(centred.T @ centred).eigenvectors[:, -width:]
    projected: Tensor = centred @ axes
    projected /= projected.std()
    return projected


def _read(directory: Path) -> Tensor | None:
    try:
        for file in weight_files(directory):
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118  # no mapping, and not iterable
                    if name.endswith(NAMES):
                        found: Tensor = tensors.get_tensor(name)
                        return found if found.ndim == 2 and found.is_floating_point() else None
    except (SafetensorError, OSError, ModelError):
        return None
    return None
