"""What is known beforehand of a step's rows, filled at once or one by one."""

from dataclasses import fields
from random import Random

import pytest

from decode.outlook import Outlook
from decode.sequence import DecodeSequence
from tests.decode.states import EOS, owner_of, task_of

BLOCK_SIZE = 4


def sequences_of(random: Random) -> list[DecodeSequence]:
    found = []
    for number in range(random.randint(1, 12)):
        stops = tuple(random.sample(range(100, 120), random.choice([0, 0, 1, 3])))
        task = task_of(f"r{number}", random.randint(1, 30), random.randint(2, 40), stop_token_ids=stops)
        sequence = DecodeSequence(owner_of(f"r{number}"), task, 0.0, [7] * random.randint(1, 9))
        sequence.number = number
        found.append(sequence)
    return found


def table_of(sequence: DecodeSequence) -> list[int]:
    tokens = sequence.prompt_tokens + len(sequence.output_ids)
    return list(range(-(-tokens // BLOCK_SIZE)))


@pytest.mark.parametrize("seed", range(20))
def test_rows_filled_at_once_are_those_added_one_by_one(seed: int) -> None:
    sequences = sequences_of(Random(seed))
    tables = {each.owner: table_of(each) for each in sequences}
    at_once, one_by_one = Outlook(BLOCK_SIZE, (EOS,)), Outlook(BLOCK_SIZE, (EOS,))
    at_once.fill(sequences, tables.__getitem__)
    for each in sequences:
        one_by_one.add(each, tables[each.owner])
    one_by_one.count()
    stops = {token for each in sequences for token in each.stop_token_ids}
    assert at_once.end_token_ids == one_by_one.end_token_ids == {EOS, *stops}
    for field in fields(Outlook):
        assert getattr(at_once, field.name) == getattr(one_by_one, field.name), field.name
    at_once.fresh.clear()
    at_once.check()


def test_the_tokens_that_end_somebody_go_with_him() -> None:
    sequences = [
        DecodeSequence(owner_of(name), task_of(name, stop_token_ids=(token,)), 0.0, [7])
        for name, token in (("a", 100), ("b", 101))
    ]
    for number, each in enumerate(sequences):
        each.number = number
    outlook = Outlook(BLOCK_SIZE, (EOS,))
    outlook.fill(sequences, lambda owner: [0, 1])
    assert outlook.end_token_ids == {EOS, 100, 101}
    outlook.remove([0])
    outlook.count()
    assert outlook.end_token_ids == {EOS, 101}
