"""``lamella plan`` from end to end, over a small model and a short trace."""

import json
import os
import re
from itertools import chain, islice
from pathlib import Path

import pytest
from typer.testing import CliRunner

from common.config_file import load_config
from common.errors import ConfigError
from services.bench.lengths import LengthMix, UniformLength
from services.cli import app
from tests.services.planner.command_line import CONFIG, run

OWN = """
[[device]]
name = "my-machine"
bf16_tflops = 300
memory_gb = 80
memory_gb_s = 2000
price_usd_h = 0.5
interchip_gb_s = 300
network_gbps = 200
figures_source = "measured here"
"""


def test_it_ranks_deployments_and_goes_on_from_its_checkpoint(trace: Path, tmp_path: Path) -> None:
    config, out, kept = tmp_path / "base.toml", tmp_path / "plan.json", tmp_path / "points.jsonl"
    config.write_text(CONFIG)
    options = ("--devices", "a100", "--rate", "6", "--config", str(config), "--checkpoint", str(kept))
    result = run(trace, *options, "--max-gpus", "4", "--json", str(out))
    assert result.exit_code == 0, result.output
    assert "disaggregation" in result.output
    first = json.loads(out.read_bytes())
    assert first["ranked"][0]["attainment"] >= 0.9
    assert [each["usd_h"] for each in first["ranked"]] == sorted(each["usd_h"] for each in first["ranked"])
    size = kept.stat().st_size
    again = run(trace, *options, "--max-gpus", "4", "--json", str(out))
    assert again.exit_code == 0, again.output
    assert json.loads(out.read_bytes()) == first
    assert kept.stat().st_size == size


def test_drawn_requests_are_planned_for_as_a_traces(config: Path, tmp_path: Path) -> None:
    out, lengths = tmp_path / "plan.json", tmp_path / "lengths.csv"
    options = ("--rate", "6", "--config", str(config), "--devices", "a100", "--json", str(out), "--seed", "3")
    drawn = {"--prompt-tokens": "200:600", "--output-tokens": "8:32", "--requests": "120"}
    result = run(None, *options, *chain(*drawn.items()))
    assert result.exit_code == 0, result.output
    found = json.loads(out.read_bytes())
    pairs = islice(LengthMix(((1.0, UniformLength(200, 600), UniformLength(8, 32)),)).draw_all(3), 120)
    rows = [f"{each.prompt_tokens},{each.output_tokens}" for each in pairs]
    lengths.write_text("\n".join(["num_prefill_tokens,num_decode_tokens", *rows]) + "\n")
    assert run(lengths, *options).exit_code == 0
    assert json.loads(out.read_bytes()) == found


def test_a_script_is_told_that_nothing_keeps_the_objectives(
    trace: Path, config: Path, tmp_path: Path
) -> None:
    """By the status; what was looked at is written nevertheless."""
    out = tmp_path / "plan.json"
    options = ("--rate", "6", "--config", str(config), "--devices", "a100", "--slo", "ttft=0.000001")
    result = run(trace, *options, "--json", str(out))
    assert result.exit_code == 1, result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)
    assert "nothing keeps the objectives" in result.output
    assert json.loads(out.read_bytes())["ranked"] == []


def test_where_the_rate_takes_more_gpus_than_allowed_it_is_said_how_many(
    trace: Path, config: Path, tmp_path: Path
) -> None:
    out = tmp_path / "plan.json"
    options = ("--rate", "40", "--config", str(config), "--devices", "a100", "--json", str(out))
    result = run(trace, *options, "--max-gpus", "1")
    assert result.exit_code == 1, result.output
    told = json.loads(out.read_bytes())["fewest_over"]
    assert told["devices"] > 1
    line = f"none is within --max-gpus 1: 40/s would take {told['devices']} GPUs, "
    assert line in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("budget", "taken"),
    [
        (("--max-cost", "6"), r"--max-cost 6: 40/s would take \d+ GPUs at \$\d+\.\d+/h, "),
        (("--max-power", "350"), r"--max-power 350: 40/s would take \d+ GPUs at [\d,]+ W, "),
    ],
)
def test_where_the_rate_takes_more_than_the_budget_it_is_said_how_much(
    trace: Path, config: Path, budget: tuple[str, ...], taken: str
) -> None:
    result = run(trace, "--rate", "40", "--config", str(config), "--devices", "a100", *budget)
    assert result.exit_code == 1, result.output
    assert re.search(f"none is within {taken}", " ".join(result.output.split()))


def test_the_most_throughput_of_dollars_and_watts_is_planned(
    trace: Path, config: Path, tmp_path: Path
) -> None:
    """Three A100s cost $15.90 an hour and draw 900 W, one H100 $11.06 and 700 W."""
    out = tmp_path / "plan.json"
    options = ("--objective", "throughput", "--config", str(config), "--json", str(out))
    found = {}
    for budget in (("--max-cost", "16"), ("--max-power", "700"), ("--max-cost", "16", "--max-power", "700")):
        result = run(trace, *options, *budget)
        assert result.exit_code == 0, result.output
        assert "headroom" not in result.output
        found[budget] = json.loads(out.read_bytes())["ranked"]
    by_cost, by_power, by_both = found.values()
    assert all(each["usd_h"] <= 16 for each in by_cost + by_both)
    assert all(each["provisioned_w"] <= 700 for each in by_power + by_both)
    assert max(each["devices"] for each in by_cost) == 3
    assert max(each["devices"] for each in by_power) == 2
    assert by_both[0]["rate_per_s"] <= min(by_cost[0]["rate_per_s"], by_power[0]["rate_per_s"])


def test_objectives_are_needed(trace: Path) -> None:
    command = ["plan", "--model", "opt-13b", "--trace", str(trace), "--rate", "1"]
    for search in ((), ("--search", "vidur"), ("--search", "lamina")):
        result = CliRunner().invoke(app, [*command, *search])
        assert isinstance(result.exception, ConfigError)
        assert (result.exception.key, result.exception.value) == ("--slo", None)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--devices", "a1000", "--rate", "1"), "--devices = 'a1000': is none of a100, a100-sxm"),
        (("--model", "opt-175b", "--max-gpus", "2", "--rate", "1"), "fits on no allowed number of devices"),
        (("--model", "opt-175b", "--max-gpus", "2", "--rate", "1"), "--max-gpus 2, where 8 a100 would do"),
        (("--model", "opt-175b", "--max-cost", "10", "--rate", "1"), "would do at $42.40/h: its weights"),
        (("--max-cost", "3", "--rate", "1"), "--max-cost 3, where 1 a100 would do at $5.30/h: its weights"),
        (("--max-cost", "3", "--rate", "1"), "GiB; 40 heads"),
        (("--model", "opt-175b", "--max-power", "2000", "--rate", "1"), "where 8 a100 would do at 2,400 W"),
        (("--model", "opt-12b", "--rate", "1"), "--model = 'opt-12b': must be a model directory or one of"),
        ((), "is needed: the requests have lengths alone"),
        (("--rate", "-1"), "must be a number of requests per second, at least 0.001"),
        (
            ("--rate", "-1", "--objective", "throughput", "--max-gpus", "2"),
            "must be a number of requests per second, at least 0.001",
        ),
        (("--rate", "1", "--objective", "fame"), "must be one of cost, power, throughput"),
        (("--objective", "throughput"), "needs --max-gpus, --max-cost or --max-power"),
        (("--rate", "1", "--max-cost", "0"), "--max-cost = 0.0: must be dollars an hour, over 0"),
        (("--rate", "1", "--max-cost", "inf"), "--max-cost = inf: must be dollars an hour, over 0"),
        (("--rate", "1", "--max-power", "-5"), "--max-power = -5.0: must be watts, over 0"),
        (("--rate", "1", "--max-power", "nan"), "--max-power = nan: must be watts, over 0"),
        (
            ("--rate", "1", "--devices", "a100,tpu-v6e", "--max-power", "5000"),
            "--max-power = 5000.0: nobody says what tpu-v6e draws",
        ),
        (("--rate", "1", "--choose", "2"), "--choose = 2: says of which one --out is to write files"),
        (("--rate", "1", "--choose", "0", "--out", "files"), "--choose = 0: must be 1 or more"),
        (("--rate", "1", "--choose", "10", "--out", "files"), "--choose = 10: must be 1 to 9"),
        (
            ("--rate", "1", "--choose", "2", "--out", "files", "--search", "vidur"),
            "--choose = 2: is of what is ranked without --search vidur",
        ),
        (("--rate", "1", "--attainment", "1.5"), "must be a share"),
        (("--rate", "1", "--devices", "tpu-v6e", "--objective", "power"), "nobody says what tpu-v6e draws"),
    ],
)
def test_what_cannot_be_planned_is_told(trace: Path, options: tuple[str, ...], said: str) -> None:
    result = run(trace, *options)
    assert isinstance(result.exception, ConfigError)
    assert said in str(result.exception)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--json", "nowhere/plan.json"), "cannot be written (No such file or directory)"),
        (("--json", "."), "is a directory"),
        (("--search", "vidur", "--json", "nowhere/plan.json"), "cannot be written"),
        (("--search", "vidur", "--plot", "nowhere/front.png"), "cannot be written"),
        (("--out", "trace.csv"), "is no directory"),
        (("--out", "trace.csv/deployment/a"), "is no directory"),
        (("--search", "distserve-low", "--out", "trace.csv"), "is no directory"),
        (("--search", "lamina", "--out", "files"), "it finds ratios"),
    ],
)
def test_a_file_that_cannot_be_written_is_told_before_anything_runs(
    trace: Path, config: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], said: str
) -> None:
    monkeypatch.chdir(trace.parent)
    kept = trace.parent / "points.jsonl"
    result = run(trace, "--rate", "1", "--config", str(config), "--checkpoint", str(kept), *options)
    assert isinstance(result.exception, ConfigError)
    assert (result.exception.key, result.exception.value) == options[-2:]
    assert said in result.exception.rule
    assert not kept.exists()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[space]\ntensors = [0]", "must name at least one"),
        ("[space]\nbatches = []", "must name at least one"),
        ("[space]\ntensor = [1]", "space.tensor = [1]: is not a known key: did you mean tensors?"),
        (
            "[space]\npolicies = [['foo', 3]]",
            "space.policies.0.0 = 'foo': must be one of prefill_first, chunked",
        ),
        ("[pool]\ncount = 1", "is what a plan is to find"),
        ("[prefix]\nscope = 'mesh'", "--config prefix = {'scope': 'mesh'}: is of `lamella simulate` alone"),
        ("[host]", "is of `lamella simulate` alone"),
        ("[prediction]\naccuracy = 0.9", "is of `lamella simulate` alone"),
        ("[[fault]]\nkind = 'death'", "is of `lamella simulate` alone"),
        ("[[scale]]\nat_s = 1", "is of `lamella simulate` alone"),
        (OWN, "is of --device-file"),
        (
            "[performance.a1000]\nkind = 'roofline'",
            "--config performance.a1000 = {'kind': 'roofline'}: must be of one of a100, a100-sxm",
        ),
        (
            "[performance.a100]\nkind = 'crystal'",
            "performance.a100.kind = 'crystal': must be one of linear, roofline",
        ),
        (
            "[performance.a100]\nkind = 'linear'\nstep_s = -1",
            "performance.a100.step_s = -1.0: must be 0 or more",
        ),
        ("[instance]\nblock_sizes = 16", "block_sizes"),
    ],
)
def test_bad_settings_are_told(trace: Path, tmp_path: Path, content: str, said: str) -> None:
    config = tmp_path / "base.toml"
    config.write_text(content)
    result = run(trace, "--rate", "1", "--config", str(config))
    assert isinstance(result.exception, ConfigError)
    assert said in str(result.exception)


@pytest.mark.parametrize(
    ("content", "said"),
    [("h200x = 2.0", "is no device"), ("h100 = -1", "must be dollars an hour"), ("h100 =", "is not TOML")],
)
def test_a_bad_price_list_is_told(trace: Path, tmp_path: Path, content: str, said: str) -> None:
    prices = tmp_path / "prices.toml"
    prices.write_text(content)
    result = run(trace, "--rate", "1", "--prices", str(prices))
    assert isinstance(result.exception, ConfigError)
    assert said in str(result.exception)


def test_processes_are_held_to_the_cores(trace: Path, tmp_path: Path) -> None:
    """Beside it prices of devices that are not asked for are said not to be looked at."""
    config, cores, prices = tmp_path / "base.toml", len(os.sched_getaffinity(0)), tmp_path / "prices.toml"
    config.write_text(CONFIG)
    prices.write_text("h100 = 2.0\na100 = 2.0\n")
    options = ("--config", str(config), "--devices", "a100", "--prices", str(prices))
    result = run(trace, "--rate", "6", *options, "--processes", "1000000")
    assert result.exit_code == 0, result.output
    said = " ".join(result.output.split())
    assert "not looked at, as --devices has no such: --prices h100" in said
    assert f"--processes 1000000: held to {cores}, one a core" in result.output


def test_a_device_of_one_s_own_wins_where_it_is_cheap(trace: Path, tmp_path: Path) -> None:
    """And no sooner: what one costs is in the file, or in the prices."""
    own, config, prices = (tmp_path / f"{name}.toml" for name in ("own", "base", "prices"))
    own.write_text(OWN)
    config.write_text(CONFIG)
    prices.write_text("my-machine = 50.0")
    out, files = tmp_path / "plan.json", tmp_path / "deployment"
    options = ("--devices", "a100,my-machine", "--device-file", str(own), "--config", str(config))
    # The last one counts: in worker processes.
    command = (trace, *options, "--rate", "6", "--json", str(out), "--processes", "2")
    result = run(*command, "--out", str(files))
    assert result.exit_code == 0, result.output
    assert "my-machine is a device of your own" in " ".join(result.output.split())
    ranked = json.loads(out.read_bytes())["ranked"]
    assert {pool["kind"]["device"] for pool in ranked[0]["pools"]} == {"my-machine"}
    assert ranked[0]["usd_h"] == pytest.approx(0.5 * ranked[0]["devices"])
    simulated = CliRunner().invoke(
        app, ["simulate", str(files / "simulate.toml"), "--trace", str(trace), "--rate", "6"]
    )
    assert simulated.exit_code == 0, simulated.output
    assert "my-machine" in simulated.output
    dear = run(*command, "--prices", str(prices))
    assert dear.exit_code == 0, dear.output
    assert {pool["kind"]["device"] for pool in json.loads(out.read_bytes())["ranked"][0]["pools"]} == {"a100"}


def test_points_of_another_machine_of_the_same_name_are_not_taken(trace: Path, tmp_path: Path) -> None:
    own, config, kept = tmp_path / "own.toml", tmp_path / "base.toml", tmp_path / "points.jsonl"
    config.write_text(CONFIG)
    sizes = []
    for tflops in (300, 300, 200):
        own.write_text(OWN.replace("bf16_tflops = 300", f"bf16_tflops = {tflops}"))
        result = run(
            *(trace, "--devices", "my-machine", "--device-file", str(own), "--config", str(config)),
            *("--rate", "6", "--checkpoint", str(kept)),
        )
        assert result.exit_code == 0, result.output
        sizes.append(kept.stat().st_size)
    assert 0 < sizes[0] == sizes[1] < sizes[2]


def test_points_of_a_device_that_was_measured_anew_are_not_taken(trace: Path, tmp_path: Path) -> None:
    """Though its file has the old name."""
    config, times, kept = tmp_path / "base.toml", tmp_path / "times.json", tmp_path / "points.jsonl"
    source = 'kind = "distserve"\npath = "times.json"\nmodel = "opt-13b"\n'
    config.write_text(f"{CONFIG}[performance.a100]\n{source}")
    sizes = []
    for step_ms in (20.0, 20.0, 25.0):
        measured = {
            "prefill": (18.0, 0.1, 7e-6),
            "decoding_smallbs": (step_ms, 6e-4, 0.04),
            "decoding_largebs": (step_ms, 6e-4, 0.04),
            "decoding_large_small_bs_threshold": 95,
        }
        times.write_text(json.dumps({"opt-13b": {"1": measured, "2": measured}}))
        options = ("--devices", "a100", "--rate", "6", "--config", str(config), "--checkpoint", str(kept))
        result = run(trace, "--search", "vidur", *options)
        assert result.exit_code == 0, result.output
        sizes.append(kept.stat().st_size)
    assert 0 < sizes[0] == sizes[1] < sizes[2]


@pytest.mark.parametrize("search", ["lamina", "distserve-low"])
def test_searches_know_a_device_of_one_s_own(trace: Path, tmp_path: Path, search: str) -> None:
    own, config, out = (tmp_path / name for name in ("own.toml", "base.toml", "found.json"))
    own.write_text(OWN)
    config.write_text(CONFIG)
    result = run(
        *(trace, "--search", search, "--rate", "6", "--config", str(config), "--json", str(out)),
        *("--devices", "my-machine", "--device-file", str(own)),
    )
    assert result.exit_code == 0, result.output
    assert "my-machine" in json.loads(out.read_bytes())["rows"][0][0]


@pytest.mark.parametrize(
    ("content", "options", "said"),
    [
        (OWN, ("--devices", "your-machine"), "--devices = 'your-machine': is none of a100, a100-sxm"),
        (OWN, ("--devices", "your-machine"), "h200, my-machine, rtx-3090"),
        (OWN.replace("my-machine", "h100"), (), "device.0.name = 'h100': is in the catalogue already"),
        (OWN.replace("= 80", "= -80"), (), "device.my-machine.memory_gb = -80.0: must be over 0"),
        (OWN, ("--devices", "my-machine", "--objective", "power"), "nobody says what my-machine draws"),
        ("[space]\ntensors = [1]", (), "must have [[device]] tables, and nothing else"),
        ("[[device]]", (), "device.0.name is not set"),
    ],
)
def test_a_bad_file_of_devices_is_told(
    trace: Path, tmp_path: Path, content: str, options: tuple[str, ...], said: str
) -> None:
    own = tmp_path / "own.toml"
    own.write_text(content)
    result = run(trace, "--rate", "1", "--device-file", str(own), *options)
    assert isinstance(result.exception, ConfigError)
    assert said in str(result.exception)


def test_the_best_one_s_files_are_written(trace: Path, config: Path, tmp_path: Path) -> None:
    out = tmp_path / "deployment"
    options = ("--rate", "6", "--config", str(config), "--devices", "a100", "--max-gpus", "4")
    result = run(trace, *options, "--out", str(out))
    assert result.exit_code == 0, result.output
    assert load_config(out / "lamella.toml", {}).objectives.ttft_s == 1.0
    assert (out / "kubernetes" / "kustomization.yaml").exists()
    simulated = CliRunner().invoke(
        app, ["simulate", str(out / "simulate.toml"), "--trace", str(trace), "--rate", "6"]
    )
    assert simulated.exit_code == 0, simulated.output
    late = run(trace, *options, "--out", str(out), "--choose", "9")
    assert isinstance(late.exception, ConfigError)
    assert "disaggregation" in late.output
    assert "--choose = 9: must be 1 to " in str(late.exception)
    assert "as many as were found: no files are written" in str(late.exception)
