"""``lamella predictor train`` as a user runs it, and what it refuses."""

import gzip
import json
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.config import Config
from common.errors import ConfigError
from common.model.tokens import Tokenizer
from services.length_predictor.prompts import Prompt, encode_prompts, read_prompts
from services.model_directory import model_directory
from tests.e2e.meshes import LAMELLA, environment
from tests.services.length_predictor.target import Target, serving

TIMEOUT_S = 100.0
POLL_S = 0.1
SUPERVISOR_LOG = "lamella-*/logs/supervisor.log"


def train(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*LAMELLA, "predictor", "train", *arguments],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(model_directory(Config().model))


def test_a_classifier_is_trained_against_a_server_and_what_it_said_is_kept(tmp_path: Path) -> None:
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "out"
    rows = [{"prompt": f"{'Write a tale of' if number % 3 else 'Name'} {number}"} for number in range(30)]
    prompts.write_text("\n".join(map(json.dumps, rows)))
    arguments = ("--prompts", str(prompts), "--output", str(output), "--epochs", "2", "--max-tokens", "300")
    with serving(Target(lambda prompt: 10 * len(prompt))) as target:
        done = train(*arguments, "--target", target.url)
        assert done.returncode == 0, done.stderr
        assert len(target.asked) == 30
        again = train(*arguments, "--target", target.url, "--granularity", "100")
        assert again.returncode == 0, again.stderr
        assert len(target.asked) == 30
    assert {each.name for each in output.iterdir()} == {
        "lengths.jsonl",
        "predictor.safetensors",
        "predictor.json",
        "confusion.png",
    }
    assert "always naming the commonest bucket" in done.stdout
    assert "200 (served)" in done.stdout
    assert "100 (served)" in again.stdout
    assert json.loads((output / "predictor.json").read_text())["granularity"] == 100


@pytest.fixture
def short_directory() -> Iterator[Path]:
    """A mesh's sockets lie in it, and their paths have to be short."""
    with tempfile.TemporaryDirectory(prefix="l-") as directory:
        yield Path(directory)


def test_a_model_is_served_by_a_mesh_of_its_own_which_ends_with_the_command_even_by_a_signal(
    tmp_path: Path, short_directory: Path
) -> None:
    """Emulated: a token every 2 s at first, so that the command is ended amid the collection."""
    prompts, config = tmp_path / "prompts.txt", tmp_path / "mesh.toml"
    prompts.write_text("\n".join(f"Tell me of {number}" for number in range(20)))
    emulated = '[instance]\nengine = "emulated"\n[emulation]\ndecode_base_s = '
    arguments = ("--prompts", str(prompts), "--output", str(tmp_path / "out"), "--config", str(config))
    variables = {**environment(), "TMPDIR": str(short_directory)}
    config.write_text(f"{emulated}2.0\n[mesh]\ndrain_timeout_s = 0.5\n")
    command = [*LAMELLA, "predictor", "train", *arguments, "--max-tokens", "400", "--epochs", "1"]
    with (tmp_path / "log").open("wb") as stderr:
        popen = subprocess.Popen(command, env=variables, stderr=stderr)
    try:
        deadline_s = time.monotonic() + TIMEOUT_S
        while not any("mesh_ready" in log.read_text() for log in short_directory.glob(SUPERVISOR_LOG)):
            assert popen.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < deadline_s
            time.sleep(POLL_S)
        popen.send_signal(signal.SIGTERM)
        assert popen.wait(TIMEOUT_S) > 0, (tmp_path / "log").read_text()
        assert not list(short_directory.glob("lamella-*")), "the mesh was left behind"
    finally:
        popen.kill()
    config.write_text(f"{emulated}0.001\n")
    done = subprocess.run(
        [*command, "--max-tokens", "250"],
        env=variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    assert len((tmp_path / "out" / "lengths.jsonl").read_text().splitlines()) == 20
    assert not list(short_directory.glob("lamella-*"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--granularity", "150"), "--granularity = 150: must be 100, 200 or 400"),
        (("--target", "nowhere"), "--target = 'nowhere': must be http"),
        (("--target", "default", "--model", "x"), "--model = 'x': is for a --target that is a URL"),
        (("--target", "http://127.0.0.1:1", "--weights", "w8a8"), "--weights = 'w8a8': is for a MODEL"),
        (("--target", "http://127.0.0.1:1", "--model", "nowhere"), "--model = 'nowhere': must be a model's"),
    ],
)
def test_an_option_that_cannot_be_is_named(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one\ntwo\n")
    done = train("--prompts", str(prompts), "--output", str(tmp_path / "out"), *arguments)
    assert done.returncode != 0
    assert message in done.stderr.replace("\n", " ")
    assert "Traceback" not in done.stderr


def test_a_source_without_a_predictor_that_reads_it_is_refused() -> None:
    done = subprocess.run(
        [*LAMELLA, "up", "--predictor", "history", "--predictor-from", "x"],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 1
    assert "--predictor-from = 'x': needs --predictor classifier or oracle" in done.stderr


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.txt", "one\n\ntwo\none\n", ["one", "two"]),
        ("a.jsonl", '"one"\n{"text": "two"}\n', ["one", "two"]),
        ("a.json", '[{"prompt": "one"}, {"instruction": "two", "input": ""}]', ["one", "two"]),
        ("a.jsonl", '{"instruction": "sum up", "input": "this"}', ["sum up\n\nthis"]),
        ("a.jsonl", '"one\u2028line\x85 only"\r\n"two"\n', ["one\u2028line\x85 only", "two"]),
    ],
)
def test_prompts_are_read_from_files_of_every_form(
    tmp_path: Path, name: str, text: str, expected: list[str]
) -> None:
    (tmp_path / name).write_text(text)
    (tmp_path / f"{name}.gz").write_bytes(gzip.compress(text.encode()))
    assert sorted(map(str, read_prompts(tmp_path / name, None))) == expected
    assert sorted(map(str, read_prompts(tmp_path / f"{name}.gz", None))) == expected
    assert len(read_prompts(tmp_path / name, 1)) == 1


def test_of_a_conversation_the_last_answer_is_left_out(tmp_path: Path) -> None:
    question: dict[str, object] = {"role": "user", "content": "hello"}
    row = {"messages": [question, {"role": "assistant", "content": "hi"}]}
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    assert read_prompts(tmp_path / "a.jsonl", None) == [[question]]


@pytest.mark.parametrize(
    ("name", "text", "rule"),
    [
        ("a.csv", "one", "must end in .jsonl, .json or .txt"),
        ("a.jsonl", "{", "is no JSON"),
        ("a.json", "{}", "must be a list of prompts"),
        ("a.jsonl", '"one"\n{"other": "two"}', "prompt 2 has no text under prompt"),
        ("a.jsonl", '{"messages": [{"role": "assistant", "content": "hi"}]}', "prompt 1 has no text"),
        ("a.txt.gz", "not gzip", "cannot be read"),
    ],
)
def test_a_file_that_holds_no_prompts_is_refused(tmp_path: Path, name: str, text: str, rule: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=rule) as caught:
        read_prompts(tmp_path / name, None)
    assert caught.value.key == "--prompts"


def test_a_prompt_is_encoded_as_the_gateway_encodes_a_chat_s_first_turn(tokenizer: Tokenizer) -> None:
    prompts: list[Prompt] = ["Hello", [{"role": "user", "content": "Hello"}]]
    as_text, as_messages = encode_prompts(prompts, tokenizer)
    rendered = tokenizer.render_chat([{"role": "user", "content": "Hello"}], {})
    assert as_text == as_messages == tuple(tokenizer.encode(rendered, add_special_tokens=False))


def test_the_shared_prompts_are_read(shared_directory: Path) -> None:
    folder = shared_directory / "data" / "length_prediction"
    counts = [
        len(read_prompts(folder / name, None))
        for name in (
            "vicuna80_question.jsonl.gz",
            "arena_hard_v0.1_question.jsonl.gz",
            "arena_hard_v2.0_question.jsonl.gz",
        )
    ]
    assert counts == [80, 500, 750]
    assert len(read_prompts(folder / "gpteacher_roleplay_simple.json.gz", 100)) == 100
