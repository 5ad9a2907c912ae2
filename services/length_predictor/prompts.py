"""Prompts from a file, as the token ids that the gateway would make of them.

JSON lines, a JSON list, or plain text with a prompt a line; gzip where the name ends so. A JSON prompt is a
text, or an object with ``prompt``, ``text``, ``instruction`` (and ``input``), or ``messages``.
"""

import gzip
import json
import random
from collections.abc import Sequence
from pathlib import Path

from common.errors import ConfigError, InvalidRequest, reason_of
from common.model.tokens import Tokenizer

Prompt = str | list[dict[str, object]]
"""A user's text, or a conversation."""
ORDER_SEED = 0


def read_prompts(file: Path, limit: int | None) -> list[Prompt]:
    """The file's different prompts, ``limit`` of them at most, in an order that is the same every time and
    not the file's. Raises ConfigError."""
    try:
        data = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
        text = data.decode()
    except (OSError, EOFError, UnicodeDecodeError) as exc:
        raise ConfigError("--prompts", str(file), f"cannot be read: {reason_of(exc)}") from exc
    name = file.name.removesuffix(".gz")
    different = {json.dumps(prompt): prompt for prompt in _parse(file, name, text)}
    prompts = list(different.values())
    random.Random(ORDER_SEED).shuffle(prompts)
    return prompts[:limit]


def _parse(file: Path, name: str, text: str) -> list[Prompt]:
    if name.endswith(".txt"):
        return [line for line in text.splitlines() if line.strip()]
    try:
        if name.endswith(".json"):
            rows = json.loads(text)
        elif name.endswith(".jsonl"):
            # Not splitlines: a JSON text may hold what Unicode, too, calls the end of a line.
            rows = [json.loads(line) for line in text.split("\n") if line.strip()]
        else:
            raise ConfigError(
                "--prompts", str(file), "must end in .jsonl, .json or .txt, and .gz behind it or not"
            )
    except ValueError as exc:
        raise ConfigError("--prompts", str(file), f"is no JSON: {exc}") from exc
    if not isinstance(rows, list):
        raise ConfigError("--prompts", str(file), "must be a list of prompts")
    return [_prompt_of(file, number, row) for number, row in enumerate(rows, start=1)]


def _prompt_of(file: Path, number: int, row: object) -> Prompt:
    match row:
        case str() as text if text:
            return text
        case {"messages": [*messages]} if messages and all(isinstance(each, dict) for each in messages):
            asked = [place for place, each in enumerate(messages) if each.get("role") == "user"]
            if asked:
                # What comes after the last question is an answer.
                return messages[: asked[-1] + 1]
        case {"prompt": str() as text} | {"text": str() as text} if text:
            return text
        case {"instruction": str() as text, "input": str() as more} if text:
            return f"{text}\n\n{more}" if more else text
        case {"instruction": str() as text} if text:
            return text
    rule = "has no text under prompt, text or instruction, and no messages with a user's"
    raise ConfigError("--prompts", str(file), f"prompt {number} {rule}")


def encode_prompts(prompts: Sequence[Prompt], tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """As a chat's first turn where the model has a template. Raises ConfigError."""
    if tokenizer.has_chat_template:
        try:
            return [
                tuple(tokenizer.encode(tokenizer.render_chat(_messages(each), {}), add_special_tokens=False))
                for each in prompts
            ]
        except InvalidRequest as exc:
            raise ConfigError("--prompts", "messages", str(exc)) from exc
    texts = [each if isinstance(each, str) else str(each[-1].get("content")) for each in prompts]
    return [tuple(tokenizer.encode(text)) for text in texts]


def _messages(prompt: Prompt) -> list[dict[str, object]]:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
