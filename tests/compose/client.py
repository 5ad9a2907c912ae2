"""Run as a program beside the stack: streams greedy completions with the official client, prints JSON.

python tests/compose/client.py BASE_URL PROMPT...                asks every prompt once, all at once
python tests/compose/client.py BASE_URL --until-told PROMPT...   over and over, until its standard input ends

A request that fails ends it with a traceback and a status that is not 0.
"""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from threading import Event

from openai import OpenAI

MAX_TOKENS = 24
TIMEOUT_S = 120.0


def stream(client: OpenAI, prompt: str) -> dict[str, object]:
    """The prompt, the text, how it ended, and what was counted."""
    text, finish_reason, completion_tokens = "", None, 0
    for chunk in client.chat.completions.create(
        model="default",
        messages=[{"role": "user", "content": prompt}],
        max_tokens=MAX_TOKENS,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    ):
        for choice in chunk.choices:
            text += choice.delta.content or ""
            finish_reason = choice.finish_reason or finish_reason
        if chunk.usage is not None:
            completion_tokens = chunk.usage.completion_tokens
    return {
        "prompt": prompt,
        "text": text,
        "finish_reason": finish_reason,
        "completion_tokens": completion_tokens,
    }


def keep_asking(client: OpenAI, prompt: str, is_told: Event) -> list[dict[str, object]]:
    """At least one answer. Says on standard output when it has the first."""
    answers = [stream(client, prompt)]
    print("asking", flush=True)
    while not is_told.is_set():
        answers.append(stream(client, prompt))
    return answers


def main() -> None:
    base_url, *prompts = sys.argv[1:]
    client = OpenAI(base_url=base_url, api_key="unused", timeout=TIMEOUT_S, max_retries=0)
    with ThreadPoolExecutor(len(prompts)) as threads:
        if prompts[0] != "--until-told":
            print(json.dumps(list(threads.map(lambda prompt: stream(client, prompt), prompts))))
            return
        is_told = Event()
        asking = [threads.submit(keep_asking, client, prompt, is_told) for prompt in prompts[1:]]
        sys.stdin.read()
        is_told.set()
        print(json.dumps([answer for each in asking for answer in each.result()]))


if __name__ == "__main__":
    main()
