"""Lengths are asked of a target once, kept as they come, and asked on where a run was ended."""

import asyncio
from pathlib import Path

import pytest

from common.errors import ConfigError
from services.length_predictor.collection import CollectionError, KnownLengths, collect_lengths
from tests.services.length_predictor.target import Target, serving

TEMPERATURE = 1.0
PROMPTS = [(token, token + 1) for token in range(10, 30)]


def collect(url: str, known: KnownLengths, max_tokens: int = 100) -> tuple[int, int]:
    """How many were refused, and how many were done with."""
    done: list[None] = []
    refused = asyncio.run(
        collect_lengths(
            url,
            PROMPTS,
            known,
            max_tokens=max_tokens,
            concurrency=3,
            on_done=lambda: done.append(None),
        )
    )
    return refused, len(done)


def lengths(known: KnownLengths, max_tokens: int = 100) -> list[int | None]:
    return [known.length_of(prompt, max_tokens) for prompt in PROMPTS]


def test_what_was_collected_is_not_asked_again(tmp_path: Path) -> None:
    file = tmp_path / "new" / "lengths.jsonl"
    with serving(Target(lambda prompt: prompt[0])) as target:
        assert collect(target.url, KnownLengths(file, TEMPERATURE)) == (0, 20)
        assert lengths(KnownLengths(file, TEMPERATURE)) == [first for first, _ in PROMPTS]
        assert collect(target.url, KnownLengths(file, TEMPERATURE)) == (0, 0)
        assert len(target.asked) == 20


def test_a_run_that_was_killed_amid_a_line_goes_on_behind_the_last_whole_one(tmp_path: Path) -> None:
    file = tmp_path / "lengths.jsonl"
    with serving(Target(lambda prompt: prompt[0])) as target:
        collect(target.url, KnownLengths(file, TEMPERATURE))
        whole = file.read_bytes()
        file.write_bytes(whole[:-7])
        assert lengths(KnownLengths(file, TEMPERATURE)).count(None) == 1
        assert collect(target.url, KnownLengths(file, TEMPERATURE)) == (0, 1)
        assert lengths(KnownLengths(file, TEMPERATURE)) == [first for first, _ in PROMPTS]


def test_what_was_cut_short_is_asked_again_only_with_a_higher_bound(tmp_path: Path) -> None:
    known = KnownLengths(tmp_path / "lengths.jsonl", TEMPERATURE)
    with serving(Target(lambda prompt: prompt[0])) as target:
        collect(target.url, known, max_tokens=20)
        assert lengths(known, 20) == [min(first, 20) for first, _ in PROMPTS]
        assert lengths(known, 15) == [min(first, 15) for first, _ in PROMPTS]
        # Ten end below 20, ten are cut there.
        assert collect(target.url, known, max_tokens=25) == (0, 10)
        assert lengths(known, 25) == [min(first, 25) for first, _ in PROMPTS]


def test_a_full_target_is_asked_again_and_a_refused_prompt_is_left_out(tmp_path: Path) -> None:
    known = KnownLengths(tmp_path / "lengths.jsonl", TEMPERATURE)
    with serving(Target(lambda prompt: 0 if prompt[0] == 10 else 5, full_times=6)) as target:
        assert collect(target.url, known) == (1, 20)
        assert lengths(known) == [None, *[5] * 19]
        assert len(target.asked) == 26


def test_a_target_that_fails_ends_the_collection_with_the_reason(tmp_path: Path, free_tcp_port: int) -> None:
    known = KnownLengths(tmp_path / "lengths.jsonl", TEMPERATURE)
    with (
        serving(Target(lambda prompt: 5, status=500)) as target,
        pytest.raises(CollectionError, match="/v1/completions answered with 500"),
    ):
        collect(target.url, known)
    with pytest.raises(CollectionError, match=f"127.0.0.1:{free_tcp_port}"):
        collect(f"http://127.0.0.1:{free_tcp_port}", known)


def test_a_broken_line_of_what_was_collected_is_named(tmp_path: Path) -> None:
    file = tmp_path / "lengths.jsonl"
    file.write_text("nonsense\n")
    with pytest.raises(ConfigError, match=r"--output = .*line 1 is no known length"):
        KnownLengths(file, TEMPERATURE)


def test_lengths_at_another_temperature_are_others_and_a_prompt_has_a_seed_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "lengths.jsonl"
    with serving(Target(lambda prompt: prompt[0])) as target:
        for temperature in (0.0, 1.0):
            collect(target.url, KnownLengths(file, temperature))
    assert [each.temperature for each in target.asked_with] == [0.0] * len(PROMPTS) + [1.0] * len(PROMPTS)
    seeds = {(*each.prompt, each.seed) for each in target.asked_with}
    assert len({each.seed for each in target.asked_with}) == len(seeds) == len(PROMPTS)
    assert None not in lengths(KnownLengths(file, 0.0)) + lengths(KnownLengths(file, 1.0))
