"""The command itself, in a process of its own: exit status, table, JSON, picture."""

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from services.bench.report import read_json
from tests.services.bench.local_server import Behaviour, LocalServer

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = "import typer; from services.bench.command import bench; typer.run(bench)"
PNG_MAGIC = b"\x89PNG\r\n\x1a\n"


async def run_command(*arguments: str | Path) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        PROGRAM,
        *map(str, arguments),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "COLUMNS": "160"},
    )
    out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def test_a_run_prints_a_table_and_writes_figures_and_a_picture(tmp_path: Path) -> None:
    figures, picture = tmp_path / "run.json", tmp_path / "run.png"
    async with LocalServer() as server:
        status, out, err = await run_command(
            *("--url", server.url + "/v1", "--rate", "200", "--requests", "20"),
            *("--prompt-tokens", "8:16", "--output-tokens", "6", "--slo", "ttft=30,tpot=30"),
            *("--background-concurrency", "2", "--json", figures, "--json-requests", "--plot", picture),
        )
    assert status == 0, err
    for word in ("TTFT", "TPOT", "TBT", "E2E", "tok/s", "goodput", "attainment 100.0%", "background"):
        assert word in out
    report = read_json(figures)
    foreground, background = report.result.loads
    assert (foreground.served, foreground.failed) == (20, 0)
    assert background.name == "background"
    assert report.requests is not None
    assert len(report.requests) == foreground.requests + background.requests
    assert report.result.config.rate_per_s == 200.0
    assert foreground.ttft is not None
    plain = json.loads(figures.read_text())
    assert plain["result"]["loads"][0]["ttft"]["p99_s"] == foreground.ttft.p99_s
    assert picture.read_bytes().startswith(PNG_MAGIC)


async def test_a_chat_run_allows_for_the_servers_template(tmp_path: Path) -> None:
    spelled = ["a", "b", *(f"{first}o{last}" for first in "bdfgklmn" for last in "bdfgklmn"), "<unk>"]
    vocabulary = {word: index for index, word in enumerate(spelled)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    async with LocalServer(template_tokens=11) as server:
        status, out, err = await run_command(
            *("--url", server.url, "--endpoint", "chat", "--tokenizer", tmp_path, "--concurrency", "2"),
            *("--requests", "4", "--prompt-tokens", "40", "--output-tokens", "3"),
        )
        counted = [len(body["messages"][0]["content"].split()) for body in server.bodies[1:]]
    assert status == 0, err
    assert counted == [29] * 4
    assert "another prompt length" not in out


async def test_nothing_served_is_a_failure_that_names_its_cause(tmp_path: Path) -> None:
    picture = tmp_path / "nothing.svg"
    async with LocalServer(Behaviour.OVERLOADED) as server:
        status, out, _ = await run_command(
            "--url", server.url, "--rate", "500", "--requests", "3", "--plot", picture
        )
    assert status == 1
    assert "nothing measured" in picture.read_text()
    assert "3 × http_503: over: full" in out


async def test_wrong_use_is_told_in_one_line(free_tcp_port: int) -> None:
    status, _, err = await run_command("--concurrency", "1", "--prompt-tokens", "many")
    assert status == 2
    assert err.startswith("error: --prompt-tokens = 'many': must be N")
    status, _, err = await run_command("--concurrency", "1", "--url", f"http://127.0.0.1:{free_tcp_port}")
    assert status == 2
    assert f"127.0.0.1:{free_tcp_port}" in err
    assert "Traceback" not in err


async def test_help_does_not_import_what_it_does_not_need() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        "import sys; import services.bench.command; "
        "heavy = {'matplotlib', 'numpy', 'uvloop', 'httptools', 'torch'}; print(heavy & set(sys.modules))",
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
    )
    out, _ = await process.communicate()
    assert out.decode().strip() == "set()"
