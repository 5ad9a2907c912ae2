"""Prompts that begin as others did: tokens whose KV is kept and needs no computing (``[prefix]``).

Live instances keep no KV of sequences that have ended: prompts share none. This says what it would be worth
if they did, for traces that say which prompts begin alike (``hash_ids``), and only there. What is kept lies
beside the KV of sequences, blocks of it are no blocks of an instance's pool, and no policy knows of it.
"""

from collections import OrderedDict
from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import msgspec

from common.errors import ConfigError
from common.ids import RequestId
from common.kv.blocks import BlockOwner
from prefill.events import ChunkSlice
from services.bench.traces import PREFIX_BLOCK_TOKENS

MOST_FORGOTTEN = 4096
"""Requests that are noted until those that are over are looked for."""
MOST_BEGUN = 4096
"""Prompts of an instance that are remembered to have begun with tokens that were kept."""


class PrefixConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Each instance keeps what it has computed, or with scope ``mesh`` all keep it together:
    ``capacity_tokens`` of KV, None: everything. It is brought to where it is needed at ``bytes_per_s``, None:
    it is there."""

    scope: Literal["instance", "mesh"] = "instance"
    capacity_tokens: int | None = None
    bytes_per_s: float | None = None


def check_prefix(prefix: PrefixConfig) -> None:
    """Raises ConfigError."""
    if prefix.capacity_tokens is not None and prefix.capacity_tokens < PREFIX_BLOCK_TOKENS:
        rule = f"must be at least a block of {PREFIX_BLOCK_TOKENS} tokens"
        raise ConfigError("prefix.capacity_tokens", prefix.capacity_tokens, rule)
    if prefix.bytes_per_s is not None and not prefix.bytes_per_s > 0:
        raise ConfigError("prefix.bytes_per_s", prefix.bytes_per_s, "must be over 0")


@dataclass(slots=True)
class PrefixCache:
    """Of blocks, by what a trace calls them and all before them. ``capacity`` None: of any number. Those that
    were used longest ago go first, of one prompt the last."""

    capacity: int | None
    _blocks: OrderedDict[int, None] = field(default_factory=OrderedDict)

    def __len__(self) -> int:
        return len(self._blocks)

    def match(self, block_hashes: Sequence[int]) -> int:
        """How many are here, from the first on; they are used now."""
        count = 0
        for each in block_hashes:
            if each not in self._blocks:
                break
            count += 1
        self.keep(block_hashes[:count])
        return count

    def keep(self, block_hashes: Sequence[int]) -> None:
        for each in reversed(block_hashes):
            self._blocks[each] = None
            self._blocks.move_to_end(each)
        while self.capacity is not None and len(self._blocks) > self.capacity:
            self._blocks.popitem(last=False)


class Reuse(NamedTuple):
    """``slices``: of a chunk, what there is to compute; ``loading_s``: until the rest is there."""

    slices: tuple[ChunkSlice, ...]
    loading_s: float


@dataclass(slots=True)
class KnownPrefixes:
    """Of the requests of a run. ``token_bytes``: of KV."""

    config: PrefixConfig
    token_bytes: int
    block_hashes: dict[RequestId, tuple[int, ...]] = field(default_factory=dict)
    _shared: PrefixCache | None = None
    _noted: int = 0

    def note(
        self, request_id: RequestId, block_hashes: tuple[int, ...], open_requests: Container[RequestId]
    ) -> None:
        """A request has come. ``open_requests``: those that are not over."""
        self.block_hashes[request_id] = block_hashes
        self._noted += 1
        if self._noted % MOST_FORGOTTEN == 0:
            known = self.block_hashes
            self.block_hashes = {each: known[each] for each in known if each in open_requests}

    def cache(self) -> PrefixCache:
        """Of an instance that begins."""
        if self.config.scope == "instance":
            return self._new_cache()
        if self._shared is None:
            self._shared = self._new_cache()
        return self._shared

    def _new_cache(self) -> PrefixCache:
        tokens = self.config.capacity_tokens
        return PrefixCache(None if tokens is None else tokens // PREFIX_BLOCK_TOKENS)


@dataclass(slots=True)
class InstancePrefixes:
    """One life's. ``hit_tokens``: that were not computed, since the start. ``_kept``: of prompts that are
    being computed, how many tokens were here at first."""

    known: KnownPrefixes
    cache: PrefixCache
    hit_tokens: int = 0
    _kept: dict[BlockOwner, int] = field(default_factory=dict)

    def reuse(self, slices: Sequence[ChunkSlice]) -> Reuse:
        left = []
        hit_tokens = 0
        for piece in slices:
            hits = min(piece.tokens, max(0, self._kept_of(piece) - piece.start))
            hit_tokens += hits
            if hits < piece.tokens:
                left.append(piece.after(hits))
        self.hit_tokens += hit_tokens
        bytes_per_s = self.known.config.bytes_per_s
        loading_s = 0.0 if bytes_per_s is None else hit_tokens * self.known.token_bytes / bytes_per_s
        return Reuse(tuple(left), loading_s)

    def note_computed(self, slices: Sequence[ChunkSlice]) -> None:
        for piece in slices:
            block_hashes = self.known.block_hashes.get(piece.request.request_id, ())
            ended = piece.start + piece.tokens
            first, last = piece.start // PREFIX_BLOCK_TOKENS, ended // PREFIX_BLOCK_TOKENS
            # Tokens of an output are nobody's prompt.
            whole = len(piece.request.prompt_ids) // PREFIX_BLOCK_TOKENS
            self.cache.keep(block_hashes[first : min(last, whole)])
            if piece.is_last:
                self._kept.pop(piece.owner, None)

    def _kept_of(self, piece: ChunkSlice) -> int:
        """Its last token is computed in any case: the next one is drawn from it."""
        if piece.start == 0:
            request = piece.request
            whole = len(request.prompt_ids) // PREFIX_BLOCK_TOKENS
            block_hashes = self.known.block_hashes.get(request.request_id, ())
            kept = self.cache.match(block_hashes[:whole]) * PREFIX_BLOCK_TOKENS
            self._kept[piece.owner] = min(kept, request.tokens - 1)
            if len(self._kept) > MOST_BEGUN:
                del self._kept[next(iter(self._kept))]
        return self._kept.get(piece.owner, 0)
