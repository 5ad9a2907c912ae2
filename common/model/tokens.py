"""Text to token ids and back, over a local transformers directory. No torch.

``tokenizer.json`` is read by the tokenizers library directly, which takes a tenth of a second where importing
transformers takes seconds; a directory without one goes through transformers. Chat templates run in jinja's
immutable sandbox with the globals that transformers gives them.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.sandbox
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.decoders import DecodeStream

from common.errors import InvalidRequest, ModelError


class Tokenizer:
    """Encodes, decodes and renders. Safe to use from several threads at once."""

    def __init__(self, directory: Path) -> None:
        self._fast = _load(directory)
        config = _read_json(directory / "tokenizer_config.json")
        self._special_tokens = _special_tokens(directory, config)
        self._template = _load_template(directory, config)

    @property
    def vocab_size(self) -> int:
        return self._fast.get_vocab_size(with_added_tokens=True)

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return self._fast.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self._fast.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def render_chat(self, messages: Sequence[Mapping[str, object]], **variables: object) -> str:
        """The prompt of a conversation. Raises InvalidRequest (the template refuses it, or there is none)."""
        if self._template is None:
            raise InvalidRequest("this model has no chat template; use /v1/completions", param="messages")
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                add_generation_prompt=True,
                **self._special_tokens,
                **variables,
            )
        except (jinja2.TemplateError, TypeError, ValueError) as exc:
            raise InvalidRequest(
                f"the chat template refuses these messages: {exc}", param="messages"
            ) from exc


class Detokenizer:
    """Turns one sequence's tokens into text as they come; a character that is not complete yet is held back.

    ``push`` costs the same whatever came before. What was pushed and then flushed equals ``decode`` of all.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        self._token_ids: list[int] = []
        self._characters = 0

    def push(self, token_id: int) -> str:
        self._token_ids.append(token_id)
        text = self._stream.step(self._tokenizer._fast, token_id) or ""
        self._characters += len(text)
        return text

    def flush(self) -> str:
        """What is still held back: an incomplete character becomes U+FFFD, as in ``decode``."""
        whole = self._tokenizer.decode(self._token_ids, skip_special_tokens=self._skip_special_tokens)
        rest = whole[self._characters :]
        self._characters = len(whole)
        return rest


def _load(directory: Path) -> FastTokenizer:
    path = directory / "tokenizer.json"
    if path.exists():
        try:
            return FastTokenizer.from_file(str(path))
        except Exception as exc:  # the library raises bare Exception
            raise ModelError(f"{path}: cannot be read: {exc}") from exc
    from transformers import AutoTokenizer

    try:
        slow = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as exc:
        raise ModelError(f"{directory}: no tokenizer that can be read: {exc}") from exc
    fast = getattr(slow, "backend_tokenizer", None)
    if not isinstance(fast, FastTokenizer):
        raise ModelError(f"{directory}: its tokenizer cannot be turned into a tokenizer.json")
    return fast


def _special_tokens(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """``bos_token`` and its like, as templates use them."""
    declared = {**_read_json(directory / "special_tokens_map.json"), **config}
    names = ("bos_token", "eos_token", "pad_token", "unk_token")
    found: dict[str, str] = {}
    for name in names:
        value = declared.get(name)
        if isinstance(value, Mapping):
            value = value.get("content")
        if isinstance(value, str):
            found[name] = value
    return found


def _load_template(directory: Path, config: Mapping[str, Any]) -> jinja2.Template | None:
    path = directory / "chat_template.jinja"
    source = path.read_text() if path.exists() else config.get("chat_template")
    if isinstance(source, list):
        source = next((each["template"] for each in source if each.get("name") == "default"), None)
    if source is None:
        return None
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as exc:
        raise ModelError(f"{directory}: its chat template cannot be read: {exc}") from exc


def _to_json(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except ValueError as exc:
        raise ModelError(f"{path}: cannot be read: {exc}") from exc
    return content if isinstance(content, dict) else {}
