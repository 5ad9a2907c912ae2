"""Run as a program beside the stack: streams greedy completions with the official client, prints JSON.

python tests/compose/client.py BASE_URL PROMPT...
"""

import json
import sys
from concurrent.futures import ThreadPoolExecutor

from openai import OpenAI

MAX_TOKENS = 24
TIMEOUT_S = 120.0


def stream(client: OpenAI, prompt: str) -> dict[str, object]:
    """The text, how it ended, and what was counted."""
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
    return {"text": text, "finish_reason": finish_reason, "completion_tokens": completion_tokens}


def main() -> None:
    base_url, *prompts = sys.argv[1:]
    client = OpenAI(base_url=base_url, api_key="unused", timeout=TIMEOUT_S, max_retries=0)
    with ThreadPoolExecutor(len(prompts)) as threads:
        print(json.dumps(list(threads.map(lambda prompt: stream(client, prompt), prompts))))


if __name__ == "__main__":
    main()
