"""Text to token ids and back, over a local transformers directory. No torch.

``tokenizer.json`` is read by the tokenizers library directly, which takes a tenth of a second where importing
transformers takes seconds; a directory without one goes through transformers. Chat templates run in jinja's
immutable sandbox with the globals that transformers gives them.
"""

import codecs
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.parser
import jinja2.sandbox
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.decoders import ByteLevel

from common.errors import InvalidRequest, ModelError

REPLACEMENT = "\ufffd"
LONGEST_HELD_TOKENS = 16
"""A character has at most four bytes; whoever still ends in U+FFFD after this many tokens meant it."""
REFUSALS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
"""What a template raises for messages that it cannot render."""


class Tokenizer:
    """Encodes, decodes and renders. Safe to use from several threads at once."""

    def __init__(self, directory: Path) -> None:
        self._fast = _load(directory)
        config = _read_json(directory / "tokenizer_config.json")
        self._special_tokens = _special_tokens(directory, config)
        self._template = _load_template(directory, config)
        self._special_ids = frozenset(
            token_id for token_id, token in self._fast.get_added_tokens_decoder().items() if token.special
        )
        self._token_bytes: dict[int, bytes] = {}
        self._whole_text: dict[int, str] = {}
        self.is_byte_level = isinstance(self._fast.decoder, ByteLevel)

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

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special_ids

    def token_bytes(self, token_id: int) -> bytes:
        """What one token stands for. In a byte-level vocabulary it may be a part of a character."""
        known = self._token_bytes.get(token_id)
        if known is None:
            known = self._token_bytes[token_id] = self._find_bytes(token_id)
        return known

    def _find_bytes(self, token_id: int) -> bytes:
        if not self.is_byte_level:
            return self.decode([token_id], skip_special_tokens=False).encode()
        token = self._fast.id_to_token(token_id)
        if token is None:
            return b""
        try:
            return bytes(BYTE_OF_CHARACTER[character] for character in token)
        except KeyError:
            # An added token with a character that stands for no byte is its own text.
            return token.encode()

    def render_chat(self, messages: Sequence[Mapping[str, object]], variables: Mapping[str, object]) -> str:
        """The prompt of a conversation; ``variables`` are the client's own and may replace any other.

        Raises InvalidRequest (the template refuses them, or there is none).
        """
        if self._template is None:
            raise InvalidRequest("this model has no chat template; use /v1/completions", param="messages")
        known = {"tools": None, "documents": None, "add_generation_prompt": True, **self._special_tokens}
        conversation = [dict(message) for message in messages]
        try:
            return self._template.render({**known, **variables, "messages": conversation})
        except REFUSALS as exc:
            raise InvalidRequest(
                f"the chat template refuses these messages: {exc}", param="messages"
            ) from exc


class Detokenizer:
    """Turns one sequence's tokens into text as they come; a character that is not complete yet is held back.

    ``push(token_id)`` costs the same whatever came before. What was pushed and then flushed equals ``decode``
    of all; ``flush()`` gives what is still held back (an incomplete character becomes U+FFFD, as in
    ``decode``).
    """

    __slots__ = ("flush", "push")

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        kind = _ByteText if tokenizer.is_byte_level else _WindowText
        text = kind(tokenizer, skip_special_tokens)
        self.push: Callable[[int], str] = text.push
        self.flush: Callable[[], str] = text.flush


class _ByteText:
    """A byte-level vocabulary: every token is its bytes, whatever stands around it.

    Most tokens are whole characters; while none is open, they are looked up as text.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._bytes_of = tokenizer.token_bytes
        self._whole_text = tokenizer._whole_text
        self._skipped = tokenizer._special_ids if skip_special_tokens else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_open = False

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        if not self._is_open:
            text = self._whole_text.get(token_id)
            if text is not None:
                return text
        text = self._utf8.decode(self._bytes_of(token_id))
        was_open, self._is_open = self._is_open, bool(self._utf8.getstate()[0])
        if not was_open and not self._is_open:
            self._whole_text[token_id] = text
        return text

    def flush(self) -> str:
        return self._utf8.decode(b"", True)


class _WindowText:
    """Any other vocabulary: a token's text depends on its neighbour (spaces, byte fallback), so the text of
    the last tokens is compared with and without the new one.

    ``_ids`` begins with tokens whose text, ``_known``, is out already.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._ids: list[int] = []
        self._settled = 0
        self._known = ""

    def push(self, token_id: int) -> str:
        self._ids.append(token_id)
        text = self._decode()
        is_incomplete = text.endswith(REPLACEMENT) and len(self._ids) - self._settled < LONGEST_HELD_TOKENS
        new = text[len(self._known) :]
        if is_incomplete or not new:
            return ""
        self._ids = self._ids[self._settled :]
        self._settled = len(self._ids)
        self._known = self._decode()
        return new

    def flush(self) -> str:
        text = self._decode()
        new, self._known = text[len(self._known) :], text
        return new

    def _decode(self) -> str:
        return self._tokenizer.decode(self._ids, skip_special_tokens=self._skip_special_tokens)


def _byte_of_character() -> dict[str, int]:
    """The byte-level alphabet: printable Latin-1 characters stand for themselves, the other bytes for the
    characters from U+0100 on, in order."""
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in plain]
    shifted = {chr(0x100 + place): byte for place, byte in enumerate(others)}
    return {chr(byte): byte for byte in plain} | shifted


BYTE_OF_CHARACTER = _byte_of_character()


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
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as exc:
        raise ModelError(f"{directory}: its chat template cannot be read: {exc}") from exc


class GenerationTag(jinja2.ext.Extension):
    """``{% generation %}`` marks an assistant's words for training; for serving it is its content."""

    tags = {"generation"}  # noqa: RUF012 (jinja's own declaration is a plain set)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


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
