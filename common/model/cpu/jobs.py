"""How a job lies in memory: words that the kernels and their callers both know."""

MULTIPLY_FLOATS, MULTIPLY_HALVES, MULTIPLY_BYTES, ATTEND_FLOATS, ATTEND_HALVES = range(5)
"""Kinds of jobs."""
LEFT, DONE, PARTS, ARGUMENTS = 0, 8, 16, 24
"""Words of a job: parts nobody has begun (a cache line of its own), parts done, how many there are, and what
the kernel is called with, the job's kind first."""
JOB_WORDS = 48
MOST_PARTS = 32
"""Into so many parts a job is cut at most: enough for two to end at the same time."""
