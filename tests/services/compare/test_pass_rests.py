"""How long models rest, by least squares over what instances counted."""

import pytest

from services.compare.engine_times import PassCounts
from services.compare.pass_rests import Rests, fit_rests

TRUE = Rests("mixed", 0.001, 0.00002, 0.0009)


def counted(gaps: int, prompts: int, decodes: int) -> PassCounts:
    seconds = TRUE.pass_s * gaps + TRUE.prompt_s * prompts + TRUE.token_s * decodes
    return PassCounts(gaps, seconds, prompts, decodes)


def test_passes_tokens_and_prompts_are_told_apart_where_runs_differ_in_them() -> None:
    runs = [counted(300, 20, 320), counted(400, 30, 4000), counted(600, 500, 900), counted(500, 5, 600)]
    assert fit_rests("mixed", runs) == pytest.approx(TRUE)


def test_who_decodes_nothing_rests_by_passes_and_prompts() -> None:
    found = fit_rests("prefill", [counted(300, 290, 0), counted(400, 40, 0)])
    assert found == pytest.approx(Rests("prefill", TRUE.pass_s, 0.0, TRUE.prompt_s))


def test_two_runs_tell_two_kinds_apart_and_no_third() -> None:
    found = fit_rests("mixed", [counted(300, 20, 320), counted(400, 300, 4000)])
    assert (found.prompt_s, found.token_s > 0) == (0.0, True)


def test_a_prompt_or_two_say_nothing() -> None:
    found = fit_rests("mixed", [counted(300, 0, 310), counted(400, 3, 4000), counted(400, 1, 900)])
    assert found.prompt_s == 0.0


def test_as_many_tokens_a_pass_do_not_tell_the_two_apart() -> None:
    found = fit_rests("decode", [counted(50, 0, 100), counted(100, 0, 250)])
    assert (found.token_s, found.prompt_s) == (0.0, 0.0)
    assert TRUE.pass_s < found.pass_s < TRUE.pass_s + 3 * TRUE.token_s
