"""``lamella simulate``: what it prints and writes."""

import csv
import json
from dataclasses import replace
from io import StringIO
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.progress import Progress
from typer.testing import CliRunner, Result

from common.errors import ConfigError
from services.bench.config import BenchConfig, check_config
from services.bench.plan import FOREGROUND, describe_offer, make_arrivals_s, plan_foreground
from services.cli import app
from services.simulator import request_files
from services.simulator import run as run_module
from services.simulator.command import _show_progress
from services.simulator.config import load_simulated
from services.simulator.output_files import OutputFiles
from tests.services.simulator.performance.conftest import write_csv
from tests.services.simulator.performance.test_splitwise import rows

PERFORMANCE = """
[pool.performance]
kind = "linear"
prefill_s = 0.01
per_prompt_token_s = 1e-4
step_s = {step_s}
"""
POOLS = """
[cluster]
model = "smollm2-135m"

[[pool]]
name = "prompts"
role = "prefill"
count = 1
kv_tokens = 100000
{extra}
{performance}
[[pool]]
name = "tokens"
role = "decode"
count = 2
kv_tokens = 100000
{extra}
{performance}
"""
TRACE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.0000000,374,44
2023-11-16 18:15:46.2000000,396,109
2023-11-16 18:15:47.1000000,879,1
2023-11-16 18:15:47.4000000,91,16
"""


def write_config(folder: Path, name: str, step_s: float, extra: str = "") -> Path:
    path = folder / name
    path.write_text(POOLS.format(performance=PERFORMANCE.format(step_s=step_s), extra=extra))
    return path


def test_the_bar_says_how_far_virtual_time_is() -> None:
    bar = Progress(console=Console(file=StringIO()))
    _show_progress(bar, bar.add_task("one", total=10), "one", 3, 93_784.2)
    [task] = bar.tasks
    assert (task.completed, task.description) == (3, "one, 1 day, 2:03:04 simulated")


FAULT = """
[[fault]]
kind = "death"
pool = "tokens"
mean_between_s = 1.0
lasts_s = 0.5
"""


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(TRACE)
    return path


def run(*arguments: object) -> Result:
    """In a terminal that cuts no table."""
    environment = {"COLUMNS": "200"}
    return CliRunner().invoke(app, ["simulate", *map(str, arguments)], env=environment)


def ran(*arguments: object) -> str:
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result.output


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def row_of(output: str, label: str) -> str:
    [line] = [line for line in output.splitlines() if line.strip().startswith(label)]
    return line


def test_configurations_are_compared_with_the_same_requests(tmp_path: Path, trace: Path) -> None:
    """Twice as slow steps: the time per token is twice as long, and first tokens come when they came."""
    fast, slow = (write_config(tmp_path, f"{name}.toml", s) for name, s in (("fast", 0.02), ("slow", 0.04)))
    written = tmp_path / "runs.json"
    output = ran(fast, "--trace", trace, "--compare", slow, "--json", written)
    both = read(written)
    assert list(both) == ["fast", "slow"]
    assert both["fast"]["done"] == both["slow"]["done"] == 4
    assert both["fast"]["ttft"] == both["slow"]["ttft"]
    assert both["slow"]["tpot"]["p50_s"] == pytest.approx(2 * both["fast"]["tpot"]["p50_s"], rel=0.05)
    assert "(1.00×)" in row_of(output, "TTFT p50, ms")
    assert "(2.0" in row_of(output, "TPOT p50, ms")
    alone = tmp_path / "run.json"
    assert "side by side" not in ran(slow, "--trace", trace, "--json", alone)
    assert read(alone) == both["slow"]


def test_a_configuration_that_cannot_be_is_told_before_any_runs(tmp_path: Path, trace: Path) -> None:
    good = write_config(tmp_path, "good.toml", 0.02)
    bad = tmp_path / "bad.toml"
    bad.write_text("[cluster]\nmodel = 'no-such-model'\n")
    result = run(good, "--trace", trace, "--compare", bad)
    assert isinstance(result.exception, ConfigError)
    assert "requests done" not in result.output
    twice = run(good, "--trace", trace, "--compare", good)
    assert isinstance(twice.exception, ConfigError)


def test_of_several_configurations_the_one_that_is_wrong_is_named(tmp_path: Path, trace: Path) -> None:
    """Also of what only shows as it runs: messages that take days."""
    good, bad = (write_config(tmp_path, f"{name}.toml", 0.02) for name in ("good", "bad"))
    for wrong, key in (
        ("memory_share = 2.0", "cluster.memory_share = 2.0"),
        ("hop_s = 1e6", "cluster.hop_s"),
    ):
        text = good.read_text().replace("[cluster]", f"[cluster]\n{wrong}")
        bad.write_text(text)
        told = run(good, "--trace", trace, "--compare", bad).exception
        assert isinstance(told, ConfigError)
        assert str(told).startswith(f"{bad}: {key}")


def test_a_traces_arrivals_come_so_many_times_as_fast(tmp_path: Path, trace: Path) -> None:
    config, rows = write_config(tmp_path, "mesh.toml", 0.02), tmp_path / "rows.csv"
    arrivals: list[list[float]] = []
    for scale in ((), ("--trace-scale", 4)):
        ran(config, "--trace", trace, "--csv", rows, *scale)
        with rows.open() as lines:
            arrivals.append([float(row["arrival_s"]) for row in csv.DictReader(lines)])
    assert arrivals[0][-1] > 0
    assert arrivals[1] == pytest.approx([each / 4 for each in arrivals[0]])
    for wrong in (("--trace-scale", 0), ("--trace-scale", 2, "--rate", 1)):
        assert isinstance(run(config, "--trace", trace, *wrong).exception, ConfigError)
    endless = run(config, "--trace", trace, "--trace-scale", 1e-9).exception
    assert isinstance(endless, ConfigError)
    assert str(endless).startswith("--trace-scale = 1e-09: spreads the trace's ")


def test_brackets_in_names_are_what_they_are(tmp_path: Path, trace: Path) -> None:
    odd = write_config(tmp_path, "[bold].toml", 0.02)
    odd.write_text(odd.read_text().replace('"prompts"', '"[/x]pre"'))
    shown = ran(odd, "--trace", trace, "--compare", write_config(tmp_path, "x[red]y.toml", 0.02))
    for name in ("[/x]pre", "[bold]", "x[red]y"):
        assert name in shown


def test_bursts_are_drawn_as_bench_draws_them(tmp_path: Path, trace: Path) -> None:
    config, rows = write_config(tmp_path, "mesh.toml", 0.02), tmp_path / "rows.csv"
    ran(config, "--trace", trace, "--csv", rows, "--rate", "2", "--burstiness", "0.25", "--seed", "3")
    with rows.open(newline="") as lines:
        came = [float(row["arrival_s"]) for row in csv.DictReader(lines)]
    bench = BenchConfig("http://nowhere", trace=trace, rate_per_s=2.0, burstiness=0.25, seed=3)
    assert came == list(islice(make_arrivals_s(bench, plan_foreground(bench)), len(came)))
    assert "gamma arrivals at 2/s, burstiness 0.25" in describe_offer(bench, FOREGROUND)
    check_config(bench)
    for broken in (replace(bench, rate_per_s=None), replace(bench, arrivals="fixed")):
        with pytest.raises(ConfigError, match="--burstiness"):
            check_config(broken)


def test_every_request_is_a_row_of_the_csv(tmp_path: Path, trace: Path) -> None:
    """Of both configurations; one token has no time per token, and who is rejected has no latency."""
    fast, slow = (write_config(tmp_path, f"{name}.toml", s) for name, s in (("fast", 0.02), ("slow", 0.04)))
    slow.write_text(slow.read_text().replace("kv_tokens = 100000", "kv_tokens = 512"))
    files = {"csv": tmp_path / "requests.csv", "json": tmp_path / "runs.json"}
    ran(fast, "--trace", trace, "--compare", slow, "--csv", files["csv"], "--json", files["json"])
    with files["csv"].open(newline="") as file:
        found = list(csv.DictReader(file))
    assert [(row["configuration"], row["request"]) for row in found] == [
        (name, str(number)) for name in ("fast", "slow") for number in range(4)
    ]
    assert [row["prompt_tokens"] for row in found[:4]] == ["374", "396", "879", "91"]
    assert {row["prefill_instance"] for row in found[:4]} == {"prompts-0"}
    assert {row["decode_instance"] for row in found[:4]} <= {"tokens-0", "tokens-1"}
    assert (found[2]["tpot_s"], found[2]["second_token_s"]) == ("", "")
    assert (found[6]["outcome"], found[6]["ttft_s"], found[6]["first_token_s"]) == ("rejected", "", "")
    measured = read(files["json"])["fast"]
    ttfts = [float(row["ttft_s"]) for row in found[:4]]
    assert max(ttfts) == measured["ttft"]["maximum_s"]
    assert [float(row["first_token_s"]) - float(row["arrival_s"]) for row in found[:4]] == ttfts


def test_without_pyarrow_it_is_said_what_parquet_needs_before_anything_runs(
    tmp_path: Path, trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_files, "find_spec", lambda name: None)
    config = write_config(tmp_path, "mesh.toml", 0.02)
    result = run(config, "--trace", trace, "--parquet", tmp_path / "requests.parquet")
    assert isinstance(result.exception, ConfigError)
    assert "lamella's extra `parquet`" in str(result.exception)
    assert "TTFT" not in result.output


@pytest.mark.parametrize("option", ["--json", "--csv", "--plot", "--timeline"])
def test_a_file_that_cannot_be_written_is_told_before_anything_runs(
    tmp_path: Path, trace: Path, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    runs = 0

    def count(*_: object, **__: object) -> None:
        nonlocal runs
        runs += 1

    monkeypatch.setattr(run_module, "simulate", count)
    config = write_config(tmp_path, "mesh.toml", 0.02)
    result = run(config, "--trace", trace, option, tmp_path / "nowhere" / "run.svg")
    assert isinstance(result.exception, ConfigError)
    assert result.exception.key == option
    assert "cannot be written" in result.exception.rule
    assert runs == 0


def test_what_was_measured_is_shown_where_its_file_can_no_longer_be_written(
    tmp_path: Path, trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, folder = write_config(tmp_path, "mesh.toml", 0.02), tmp_path / "gone"
    folder.mkdir()

    def check_and_lose(self: OutputFiles, configurations: int) -> None:
        check(self, configurations)
        folder.rmdir()

    check = OutputFiles.check
    monkeypatch.setattr(OutputFiles, "check", check_and_lose)
    result = run(config, "--trace", trace, "--json", folder / "run.json")
    assert isinstance(result.exception, ConfigError)
    assert "TTFT" in result.output


def test_parquet_has_what_the_csv_has(tmp_path: Path, trace: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    config = write_config(tmp_path, "mesh.toml", 0.02)
    files = (tmp_path / "requests.csv", tmp_path / "requests.parquet")
    ran(config, "--trace", trace, "--csv", files[0], "--parquet", files[1])
    found = parquet.read_table(files[1]).to_pylist()
    with files[0].open(newline="") as file:
        texts = [{key: "" if value is None else str(value) for key, value in row.items()} for row in found]
        assert texts == list(csv.DictReader(file))
    assert isinstance(found[0]["ttft_s"], float)
    assert isinstance(found[0]["attempts"], int)


def test_what_a_run_cost_is_told_and_what_is_not_known_too(tmp_path: Path, trace: Path) -> None:
    known = write_config(tmp_path, "known.toml", 0.02, 'device = "h100"')
    unknown = write_config(tmp_path, "unknown.toml", 0.02, 'device = "tpu-v6e"')
    output = ran(known, "--trace", trace, "--compare", unknown)
    assert row_of(output, "$/h").split()[1:] == ["33.18", "8.10", "(0.24×)"]
    assert row_of(output, "mean kW").split()[-1] == "unknown"
    assert "requests per dollar, unknown per kWh" in output


def test_fitted_sources_are_told_with_their_errors_on_held_out_data(tmp_path: Path, trace: Path) -> None:
    """Pools of one source together; what nothing was fitted for has none."""
    write_csv(tmp_path / "perf_model.csv", rows())
    fitted: dict[str, object] = {"kind": "splitwise", "path": "perf_model.csv", "model": "m", "hardware": "h"}
    straight: dict[str, object] = {"kind": "linear", "step_s": 0.02}
    pools = {"one": fitted, "other": fitted, "straight": straight}
    config = tmp_path / "mesh.toml"
    config.write_text(
        "[cluster]\nmodel = 'llama3-8b'\n"
        + "".join(
            f"[[pool]]\nname = '{name}'\nrole = 'mixed'\ncount = 1\ndevices = 8\nkv_tokens = 10000\n"
            f"[pool.performance]\n" + "".join(f"{key} = {value!r}\n" for key, value in source.items())
            for name, source in pools.items()
        )
    )
    lines = ran(config, "--trace", trace, "--held-out").splitlines()
    first = lines.index("one, other (splitwise):")
    *errors, last = lines[first + 1 :]
    expected = load_simulated(config).pools[0].held_out()
    assert len(expected) == 2
    assert [line.strip() for line in errors] == [str(error) for error in expected]
    assert last == "straight (linear): nothing was fitted here"
    assert "held-out" not in ran(config, "--trace", trace)


def test_a_run_is_drawn_and_a_timeline_is_of_one_configuration(tmp_path: Path, trace: Path) -> None:
    config, other = (write_config(tmp_path, f"{name}.toml", 0.02) for name in ("one", "other"))
    written = tmp_path / "timeline.json"
    picture = tmp_path / "run.png"
    ran(config, "--trace", trace, "--timeline", written, "--plot", picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
    names = {each["args"]["name"] for each in read(written)["traceEvents"] if each["name"] == "process_name"}
    assert {"gateway", "prompts-0"} <= names
    written.unlink()
    both = run(config, "--trace", trace, "--compare", other, "--timeline", written)
    assert isinstance(both.exception, ConfigError)
    assert not written.exists()


def test_one_file_is_not_for_two(tmp_path: Path, trace: Path) -> None:
    config = write_config(tmp_path, "mesh.toml", 0.02)
    (tmp_path / "link").symlink_to(tmp_path / "out")
    both = run(config, "--trace", trace, "--json", tmp_path / "out", "--csv", tmp_path / "link")
    assert "--csv" in str(both.exception)
    assert "is the file of --json, too" in str(both.exception)
    assert not (tmp_path / "out").exists()


def test_what_befalls_a_mesh_is_the_seeds(tmp_path: Path, trace: Path) -> None:
    config = write_config(tmp_path, "mesh.toml", 0.02)
    config.write_text(config.read_text() + FAULT)
    first, again, other = (
        ran(config, "--trace", trace, "--seed", str(seed)).splitlines()[-1] for seed in (1, 1, 2)
    )
    assert first == again != other
    assert "changes of the mesh: death " in ran(config, "--trace", trace, "--seed", "1")


def digest_of(output: str) -> str:
    return output.splitlines()[-1]


def test_drawn_requests_are_simulated_as_a_traces_of_the_same_lengths(tmp_path: Path) -> None:
    """To the digest of all records and to every figure, with those that do not fit, which are rejected."""
    config = write_config(tmp_path, "mesh.toml", 0.02)
    config.write_text(config.read_text().replace("kv_tokens = 100000", "kv_tokens = 1536"))
    files = {"csv": tmp_path / "requests.csv", "json": tmp_path / "run.json"}
    load = ("--rate", 2, "--requests", 40, "--seed", 5)
    drawn = ran(config, "--workload", "hpld", *load, "--json", files["json"], "--csv", files["csv"])
    with files["csv"].open(newline="") as file:
        found = list(csv.DictReader(file))
    lengths = tmp_path / "lengths.csv"
    rows = [f"{row['prompt_tokens']},{row['output_tokens']}" for row in found]
    lengths.write_text("\n".join(["num_prefill_tokens,num_decode_tokens", *rows]) + "\n")
    outcomes = {row["outcome"]: int(row["prompt_tokens"]) for row in found}
    assert outcomes.keys() == {"done", "rejected"}
    assert outcomes["rejected"] > 1536 - 128
    again = tmp_path / "again.json"
    assert digest_of(ran(config, "--trace", lengths, *load, "--json", again)) == digest_of(drawn)
    assert read(again) == read(files["json"])


def test_what_is_drawn_is_the_seeds_and_the_same_for_every_configuration(tmp_path: Path) -> None:
    fast, slow = (write_config(tmp_path, f"{name}.toml", s) for name, s in (("fast", 0.02), ("slow", 0.04)))
    load = ("--prompt-tokens", "64:256", "--output-tokens", "8", "--rate", 4, "--requests", 20)
    first, again, other = (digest_of(ran(fast, *load, "--seed", seed)) for seed in (1, 1, 2))
    assert first == again != other
    rows = tmp_path / "rows.csv"
    ran(fast, *load, "--arrivals", "fixed", "--compare", slow, "--csv", rows)
    with rows.open(newline="") as file:
        found = [(each["arrival_s"], each["prompt_tokens"]) for each in csv.DictReader(file)]
    assert found[:20] == found[20:]
    assert [float(arrival_s) for arrival_s, _ in found[:20]] == [number / 4 for number in range(20)]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "--trace is not set: nothing says which requests come"),
        (
            ("--workload", "lpld", "--requests", "5"),
            "--rate is needed: the requests have lengths alone",
        ),
        (("--workload", "lpld", "--rate", "1"), "--requests is needed"),
        (
            ("--workload", "lpld", "--rate", "1", "--requests", "5", "--trace-scale", "2"),
            "--trace-scale = 2.0: is of the arrivals of --trace",
        ),
    ],
)
def test_without_a_trace_it_is_said_what_is_needed(
    tmp_path: Path, arguments: tuple[str, ...], said: str
) -> None:
    found = run(write_config(tmp_path, "mesh", 0.02), *arguments)
    assert isinstance(found.exception, ConfigError)
    assert str(found.exception).startswith(said)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--rate", "1e-9"), "--rate = 1e-09: must be a number of requests per second, at least 0.001"),
        (("--rate", "nan"), "--rate = nan: must be a number"),
        (("--rate", "1", "--slo", "ttft=0"), "--slo = 'ttft=0': ttft must be over 0 seconds"),
        ((), "--rate is needed: the requests have lengths alone"),
        (("--rate", "1", "--arrivals", "foo"), "--arrivals = 'foo': must be one of poisson, fixed"),
        (("--arrivals", "foo"), "--arrivals = 'foo': must be one of poisson, fixed"),
        (("--arrivals", "fixed"), "--arrivals = 'fixed': is of --rate"),
        (("--burstiness", "0.5"), "--burstiness = 0.5: is of the arrivals at a --rate"),
        (("--rate", "1", "--burstiness", "0"), "--burstiness = 0.0: must be over 0"),
        (("--rate", "1", "--burstiness", "2", "--arrivals", "fixed"), "--burstiness = 2.0: is of gaps"),
    ],
)
def test_what_cannot_be_meant_is_told_by_its_option(
    tmp_path: Path, arguments: tuple[str, ...], said: str
) -> None:
    lengths = tmp_path / "lengths.csv"
    lengths.write_text("num_prefill_tokens,num_decode_tokens\n30,4\n")
    found = run(write_config(tmp_path, "mesh", 0.02), "--trace", lengths, *arguments)
    assert isinstance(found.exception, ConfigError)
    assert str(found.exception).startswith(said)
