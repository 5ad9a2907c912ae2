"""Text to tokens and back, against transformers' own tokenizer over the same directory."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import InvalidRequest, ModelError
from common.model.default_model import default_model_directory
from common.model.tokens import Detokenizer, Tokenizer

DIRECTORY = default_model_directory(Path("~/.cache/lamella"))
TOKENIZER = Tokenizer(DIRECTORY)
TOKEN_IDS = st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=24)

TEXTS = (
    "",
    " leading and trailing ",
    "Ünïcode, 日本語, עברית and 👩‍👩‍👧‍👦 families",
    "In 2026, 1234567 tokens at 3.14 a piece",
    "def f(x):\n\treturn  x ** 2\r\n",
    "<|im_start|>user\nhello<|im_end|>",
)

CONVERSATIONS: tuple[list[dict[str, object]], ...] = (
    [{"role": "user", "content": "Hello!"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 2+2? 日本"}],
    [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello <b>you</b> & {{ all }}"},
        {"role": "user", "content": ""},
    ],
)


@pytest.fixture(scope="module")
def reference() -> Any:
    import transformers

    return transformers.AutoTokenizer.from_pretrained(DIRECTORY, local_files_only=True)


@pytest.mark.parametrize("text", TEXTS)
def test_text_encodes_and_decodes_as_in_transformers(text: str, reference: Any) -> None:
    token_ids = TOKENIZER.encode(text)
    assert token_ids == reference.encode(text)
    for skip in (True, False):
        expected = reference.decode(token_ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        assert TOKENIZER.decode(token_ids, skip_special_tokens=skip) == expected


@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_a_conversation_renders_as_in_transformers(messages: list[dict[str, object]], reference: Any) -> None:
    rendered = TOKENIZER.render_chat(messages, {})
    assert rendered == reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    token_ids = reference.apply_chat_template(
        messages, tokenize=True, add_generation_prompt=True, return_dict=False
    )
    assert TOKENIZER.encode(rendered, add_special_tokens=False) == token_ids


@settings(max_examples=200, deadline=None)
@given(st.text(st.characters(codec="utf-8", max_codepoint=0xFFFF) | st.sampled_from("🙂👩🎉"), max_size=60))
def test_encoded_text_decodes_in_a_stream_as_at_once(text: str) -> None:
    token_ids = TOKENIZER.encode(text, add_special_tokens=False)
    assert streamed(token_ids, skip_special_tokens=False) == TOKENIZER.decode(
        token_ids, skip_special_tokens=False
    )


@settings(max_examples=300, deadline=None)
@given(TOKEN_IDS, st.booleans())
def test_streamed_text_equals_the_whole_decoded_at_once(token_ids: list[int], skip: bool) -> None:
    assert streamed(token_ids, skip_special_tokens=skip) == TOKENIZER.decode(
        token_ids, skip_special_tokens=skip
    )


def test_no_piece_shows_half_a_character() -> None:
    token_ids = TOKENIZER.encode("👩‍👩‍👧 日本語", add_special_tokens=False)
    detokenizer = Detokenizer(TOKENIZER)
    pieces = [detokenizer.push(token_id) for token_id in token_ids]
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(pieces)
    assert "".join(pieces) == "👩‍👩‍👧 日本語"
    assert detokenizer.flush() == ""


def test_flushing_twice_repeats_nothing() -> None:
    token_ids = TOKENIZER.encode("日", add_special_tokens=False)[:1]
    detokenizer = Detokenizer(TOKENIZER)
    assert detokenizer.push(token_ids[0]) == ""
    assert detokenizer.flush() == TOKENIZER.decode(token_ids)
    assert detokenizer.flush() == ""


@given(st.from_regex(r"[0-9]{1,12}", fullmatch=True))
def test_every_digit_is_a_token_of_its_own(digits: str) -> None:
    token_ids = TOKENIZER.encode(digits, add_special_tokens=False)
    assert [TOKENIZER.decode([token_id]) for token_id in token_ids] == list(digits)


@pytest.mark.parametrize("name", ["messages", "self", "bos_token", "add_generation_prompt"])
def test_a_variable_of_any_name_is_no_defect(name: str) -> None:
    """Clients name template variables, so a name that our own call also uses must do no harm."""
    rendered = TOKENIZER.render_chat([{"role": "user", "content": "Hello!"}], {name: False})
    assert "Hello!" in rendered


def test_whatever_a_template_raises_is_the_clients_error(tmp_path: Path) -> None:
    for number, template in enumerate(("{{ raise_exception('no') }}", "{{ 1 // 0 }}", "{{ none.x.y }}")):
        directory = tmp_path / str(number)
        directory.mkdir()
        shutil.copy(DIRECTORY / "tokenizer.json", directory)
        (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
        with pytest.raises(InvalidRequest) as caught:
            Tokenizer(directory).render_chat([{"role": "user", "content": "Hello!"}], {})
        assert caught.value.param == "messages"


def test_a_template_cannot_reach_out_of_its_sandbox(tmp_path: Path) -> None:
    shutil.copy(DIRECTORY / "tokenizer.json", tmp_path)
    template = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    with pytest.raises(InvalidRequest):
        Tokenizer(tmp_path).render_chat([{"role": "user", "content": "Hello!"}], {})


def test_a_model_without_a_chat_template_says_so(tmp_path: Path) -> None:
    shutil.copy(DIRECTORY / "tokenizer.json", tmp_path)
    tokenizer = Tokenizer(tmp_path)
    assert not tokenizer.has_chat_template
    with pytest.raises(InvalidRequest, match="no chat template") as caught:
        tokenizer.render_chat([{"role": "user", "content": "Hello!"}], {})
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("tokenizer.json", "{", "cannot be read"),
        ("tokenizer_config.json", "{", "cannot be read"),
        ("chat_template.jinja", "{% if %}", "chat template cannot be read"),
    ],
)
def test_a_broken_file_is_named(name: str, content: str, reason: str, tmp_path: Path) -> None:
    shutil.copy(DIRECTORY / "tokenizer.json", tmp_path)
    (tmp_path / name).write_text(content)
    with pytest.raises(ModelError, match=reason) as caught:
        Tokenizer(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_a_directory_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no tokenizer"):
        Tokenizer(tmp_path)


def streamed(token_ids: list[int], *, skip_special_tokens: bool) -> str:
    detokenizer = Detokenizer(TOKENIZER, skip_special_tokens=skip_special_tokens)
    return "".join([*(detokenizer.push(token_id) for token_id in token_ids), detokenizer.flush()])
