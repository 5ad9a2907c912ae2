"""The prompts on which docs/benchmarks.md tells the length classifier's accuracy: chats and tasks.

    python bench/length_prompts.py --data DIR --output prompts.jsonl
    lamella predictor train --prompts prompts.jsonl --output DIR

DIR holds the question files of arena-hard v0.1 and v2.0 and of vicuna-80, and gpteacher's roleplay set. Chats
are drawn from all of them, up to a length; tasks ask one of five things about a roleplay response. Both are
shuffled together, so that ``--limit`` takes a mixture, too.
"""

import argparse
import gzip
import json
import random
from pathlib import Path

from services.length_predictor.prompts import Prompt, read_prompts

ROLEPLAY = "gpteacher_roleplay_simple.json.gz"
QUESTIONS = (
    "arena_hard_v0.1_question.jsonl.gz",
    "arena_hard_v2.0_question.jsonl.gz",
    "vicuna80_question.jsonl.gz",
)
TASKS = (
    "Summarize the following text in one sentence.",
    "Give the following text a title. Answer with the title only.",
    "Is the mood of the following text positive, negative or neutral? Answer with one word.",
    "List five keywords of the following text, separated by commas.",
    "Rewrite the following text in simple words, so that a child understands it.",
)
CHAT_CHARACTERS = 4000
TEXT_CHARACTERS = range(200, 1501)


def chats(data: Path, count: int, chance: random.Random) -> list[Prompt]:
    found = [
        prompt
        for name in (ROLEPLAY, *QUESTIONS)
        for prompt in read_prompts(data / name, None)
        if len(json.dumps(prompt)) <= CHAT_CHARACTERS
    ]
    return chance.sample(found, count)


def tasks(data: Path, count: int, chance: random.Random) -> list[Prompt]:
    with gzip.open(data / ROLEPLAY, "rt") as file:
        responses = {row["response"] for row in json.load(file)}
    texts = sorted(text for text in responses if len(text) in TEXT_CHARACTERS)
    return [
        f"{TASKS[index % len(TASKS)]}\n\n{text}" for index, text in enumerate(chance.sample(texts, count))
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--chats", type=int, default=300)
    parser.add_argument("--tasks", type=int, default=400)
    options = parser.parse_args()
    chance = random.Random(0)
    prompts = chats(options.data, options.chats, chance) + tasks(options.data, options.tasks, chance)
    chance.shuffle(prompts)
    with options.output.open("w") as file:
        for prompt in prompts:
            row = {"prompt": prompt} if isinstance(prompt, str) else {"messages": prompt}
            file.write(json.dumps(row) + "\n")
    print(f"{len(prompts)} prompts in {options.output}")


if __name__ == "__main__":
    main()
