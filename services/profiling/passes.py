"""The passes that a profile measures, and what they consist of: chunks of prompts, decode steps, and passes
that are more than one of either."""

import math
from collections.abc import Iterator

from common.kv.blocks import blocks_for
from common.messages import SamplingParams
from common.steps import Draw, SequenceStep
from services.hosts.engines import Engine

CHUNKS = (16, 32, 64, 128, 256, 512, 1024)
RESTS = (45, 61, 90, 125, 181, 245)
"""Of no round number, as most prompts' last chunks: just under a whole tile of rows they take longer than
it."""
FEW = (1, 4, 8)
"""As a prompt's rest beside what is cached: fewer than ``LAW_TOKENS``."""
BEFORES = (0, 256, 1024)
"""Tokens before chunks."""
NEAR, NEAR_TOKENS = 64, 256
"""Before chunks of at most so many, too: the first tokens before them cost most, as attention has a part more
then, and where chunks are short every prompt has some."""
BATCHES = (1, 2, 4, 8, 16, 17, 24, 32, 33, 48, 49, 64, 65, 128)
"""Up to whole tiles of 16 rows and just over them: there, with AMX, a step begins to take a tile's products
more."""
CONTEXTS = (32, 128, 256, 512, 1024)
MOST_TOKENS, MOST_BEFORE, MOST_BATCH, MOST_CONTEXT = 8192, 16384, 512, 16384
"""Of larger passes, which are measured where they do not take long (``larger_chunks``, ``larger_steps``)."""
SHARED = (
    (((0, 32), (0, 32)), 0, 0),
    (((0, 128), (0, 128)), 0, 0),
    (((0, 64),) * 4, 0, 0),
    (((0, 16),) * 4, 0, 0),
    (((0, 8),) * 4, 0, 0),
    (((0, 4),) * 8, 0, 0),
    (((0, 16),), 4, 64),
    (((0, 8),) * 4, 8, 64),
    (((0, 45),), 1, 128),
    (((0, 64),), 4, 128),
    (((0, 128),), 16, 128),
    (((0, 256),), 4, 128),
    (((256, 240),), 2, 512),
    (((0, 181),), 4, 512),
    (((512, 256),), 2, 1024),
    (((61, 61),), 3, 128),
    (((126, 63),), 1, 256),
    (((116, 58),), 6, 64),
    (((50, 50),), 14, 64),
    (((240, 120),), 8, 128),
    (((44, 44), (0, 20)), 0, 0),
    (((180, 64), (0, 64)), 0, 0),
)
"""Passes that are more than a chunk or a step: chunks, and how many decodes of which context go along. What
a chunk more costs shows in short passes of many; that decodes leave a prompt's chunks fewer tokens, and one
prompt's rest the next one's, begins the later ones amid tiles of keys."""
LARGER_SHARED = (
    (((0, 512), (0, 512)), 0, 0),
    (((0, 256),) * 4, 0, 0),
    (((0, 1024), (0, 1024)), 0, 0),
    (((0, 512),), 32, 512),
    (((0, 1024),), 64, 512),
    (((1024, 1024),), 128, 512),
)
"""Where none of their parts takes long alone."""
GREEDY = SamplingParams(max_tokens=1 << 20, temperature=0.0)

Case = tuple[int, int]
"""A chunk's (tokens before, tokens), or a step's (batch, context of each on average)."""
Shared = tuple[tuple[Case, ...], int, int]
"""Chunks, and a step's batch and context."""


def as_chunk(case: Case) -> Shared:
    return (case,), 0, 0


def as_step(case: Case) -> Shared:
    return (), *case


def chunk_cases() -> list[Case]:
    sizes = sorted(FEW + CHUNKS + RESTS)
    cases = [(before, tokens) for tokens in sizes for before in BEFORES]
    return cases + [(NEAR, tokens) for tokens in sizes if tokens <= NEAR_TOKENS]


def step_cases() -> list[Case]:
    return [(batch, context) for batch in BATCHES for context in CONTEXTS]


def larger_chunks(case: Case) -> Iterator[Case]:
    """The next in size after one of the largest: of twice as many tokens, or after four times as many."""
    before, tokens = case
    if CHUNKS[-1] <= tokens < MOST_TOKENS:
        yield before, 2 * tokens
    if BEFORES[-1] <= before < MOST_BEFORE:
        yield 4 * before, tokens


def larger_steps(case: Case) -> Iterator[Case]:
    """Likewise: of twice the batch, or the context."""
    batch, context = case
    if BATCHES[-1] <= batch < MOST_BATCH:
        yield 2 * batch, context
    if CONTEXTS[-1] <= context < MOST_CONTEXT:
        yield batch, 2 * context


def has_room(engine: Engine, case: Shared) -> bool:
    """Whether the pool and the context hold it."""
    chunks, batch, context = case
    ends = [sum(each) for each in chunks] + [each + 1 for each in spread(batch, context)]
    blocks = sum(blocks_for(each, engine.layout.block_size) for each in ends)
    return blocks <= engine.total_blocks and max(ends) <= engine.context_length


def pass_of(engine: Engine, case: Shared) -> list[SequenceStep]:
    """As live no two decodes are as long, and their blocks lie as they came by them in turn, after those of
    the chunks."""
    chunks, batch, context = case
    steps: list[SequenceStep] = []
    first = 0
    for before, tokens in chunks:
        steps.append(_chunk(engine, before, tokens, first))
        first += blocks_for(before + tokens, engine.layout.block_size)
    return steps + _decodes(engine, batch, context, first)


def _chunk(engine: Engine, before: int, tokens: int, first: int) -> SequenceStep:
    """As if ``before`` tokens of the prompt had been computed: what their KV holds costs nothing else. In
    blocks from ``first`` on."""
    blocks = tuple(range(first, first + blocks_for(before + tokens, engine.layout.block_size)))
    return SequenceStep(_prompt(tokens), before, blocks, Draw(GREEDY, (1,) * (before + tokens), ()))


def _decodes(engine: Engine, batch: int, context: int, first: int) -> list[SequenceStep]:
    contexts = spread(batch, context)
    tables: list[list[int]] = [[] for _ in contexts]
    needed = [blocks_for(each + 1, engine.layout.block_size) for each in contexts]
    for turn in range(max(needed, default=0)):
        for table, blocks in zip(tables, needed, strict=True):
            if turn < blocks:
                table.append(first)
                first += 1
    return [
        SequenceStep((1,), each, tuple(table), Draw(GREEDY, (1,) * each, (1,)))
        for each, table in zip(contexts, tables, strict=True)
    ]


def spread(batch: int, mean: int) -> list[int]:
    """So many numbers of that mean, the shortest first: quantiles of an exponential distribution, as many
    short ones and few long ones come together."""
    if not batch:
        return []
    parts = [-math.log(1 - (index + 0.5) / batch) for index in range(batch)]
    scale = mean * batch / math.fsum(parts)
    found = [max(1, int(scale * part)) for part in parts]
    found[-1] += mean * batch - sum(found)
    return found


def _prompt(tokens: int) -> tuple[int, ...]:
    """Of tokens that every vocabulary has: what they say takes no time."""
    return tuple(1 + index % 15 for index in range(tokens))
