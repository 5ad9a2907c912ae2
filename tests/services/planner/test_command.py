"""``lamella plan`` from end to end, over a small model and a short trace."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from common.config_file import load_config
from common.errors import ConfigError
from services.cli import app
from services.planner import worker_configuration

ROWS = 120
CONFIG = """
[instance]
block_size = 16
[space]
tensors = [1, 2]
pipelines = [1]
batches = [64]
policies = [["chunked", 512]]
chunks = [["chunks", 512]]
"""
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


MOST = ("--objective", "throughput", "--max-gpus", "4")


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    lines = [f"{200 + 37 * number % 400},{8 + 11 * number % 24}" for number in range(ROWS)]
    path.write_text("\n".join(["num_prefill_tokens,num_decode_tokens", *lines]) + "\n")
    return path


def run(trace: Path, *options: str) -> Result:
    command = ["plan", "--trace", str(trace), "--processes", "1", *options]
    if "--model" not in options:
        command += ["--model", "opt-13b"]
    if "--slo" not in options:
        command += ["--slo", "ttft=1,tpot=0.05"]
    return CliRunner().invoke(app, command)


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


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--devices", "a1000", "--rate", "1"), "--devices = 'a1000': is none of a100, a100-sxm"),
        (("--model", "opt-175b", "--max-gpus", "2", "--rate", "1"), "fits on no allowed number of devices"),
        (("--model", "opt-12b", "--rate", "1"), "must be a model directory or one of"),
        ((), "is needed: the trace has lengths alone"),
        (("--rate", "-1"), "must be a number of requests per second, at least 0.001"),
        (
            ("--rate", "-1", "--objective", "throughput", "--max-gpus", "2"),
            "must be a number of requests per second, at least 0.001",
        ),
        (("--rate", "1", "--objective", "fame"), "must be one of cost, power, throughput"),
        (("--objective", "throughput"), "needs --max-gpus"),
        (("--rate", "1", "--choose", "2"), "--choose = 2: says of which one --out is to write files"),
        (("--rate", "1", "--choose", "0", "--out", "files"), "--choose = 0: must be 1 or more"),
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
            "performance.kind = 'crystal': must be one of linear, roofline",
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
        ("[[device]]", (), "device.0.name = None"),
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


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "base.toml"
    path.write_text(CONFIG)
    return path


@pytest.mark.parametrize(
    ("search", "options", "said"),
    [
        ("distserve-high", (), "goodput"),
        ("distserve-low", (), "pairs"),
        ("vidur", (), "capacity"),
        ("aladdin", (), "equation 7"),
        ("lamina", ("--devices", "h100,h20"), "attention on devices of its own"),
    ],
)
def test_each_paper_s_search_runs(
    trace: Path, config: Path, tmp_path: Path, search: str, options: tuple[str, ...], said: str
) -> None:
    out, devices = tmp_path / "found.json", options or ("--devices", "a100")
    result = run(
        trace, "--search", search, "--rate", "6", "--config", str(config), "--json", str(out), *devices
    )
    assert result.exit_code == 0, result.output
    assert said in result.output
    assert json.loads(out.read_bytes())["rows"]


@pytest.mark.parametrize(
    ("search", "rate", "most", "enough"),
    [
        ("distserve-high", "6", "1", "8"),
        ("distserve-low", "6", "1", "8"),
        ("vidur", "60", "1", "24"),
        ("aladdin", "60", "1", "24"),
    ],
)
def test_no_search_names_more_devices_than_allowed(
    trace: Path, config: Path, tmp_path: Path, search: str, rate: str, most: str, enough: str
) -> None:
    out, files = tmp_path / "found.json", tmp_path / "files"
    options = ("--search", search, "--config", str(config), "--devices", "a100", "--json", str(out))
    # At its capacity Vidur's search lets requests wait for five seconds.
    command = (trace, *options, "--slo", "ttft=20,tpot=0.2", "--rate", rate, "--out", str(files))
    over = run(*command, "--max-gpus", most)
    assert isinstance(over.exception, ConfigError)
    assert "no such deployment was found" in str(over.exception)
    assert not files.exists()
    found = json.loads(out.read_bytes())
    assert found["rows"]
    assert found["chosen"] == []
    assert re.match(rf"none is within --max-gpus {most}: {rate}/s would take \d+ GPUs", found["lines"][-1])
    within = run(*command, "--max-gpus", enough)
    assert within.exit_code == 0, within.output
    pools = json.loads(out.read_bytes())["chosen"]
    assert 0 < sum(pool["count"] * pool["kind"].get("tensor", 1) for pool in pools) <= int(enough)


def test_another_than_the_best_is_named_where_that_alone_is_allowed(
    trace: Path, config: Path, tmp_path: Path
) -> None:
    """The dear device serves the rate with fewer."""
    out, prices = tmp_path / "found.json", tmp_path / "prices.toml"
    prices.write_text("a100 = 1.0\nh100 = 30.0")
    options = ("--search", "vidur", "--config", str(config), "--devices", "a100,h100", "--rate", "60")
    devices = []
    for most in ("100", "2"):
        result = run(trace, *options, "--prices", str(prices), "--max-gpus", most, "--json", str(out))
        assert result.exit_code == 0, result.output
        [pool] = json.loads(out.read_bytes())["chosen"]
        devices.append((pool["kind"]["device"], pool["count"] * pool["kind"].get("tensor", 1) <= 2))
    assert devices == [("a100", False), ("h100", True)]


def test_aladdin_says_so_where_no_number_of_workers_is_enough(
    trace: Path, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_configuration, "MOST_WORKERS", 8)
    out = tmp_path / "found.json"
    options = ("--config", str(config), "--devices", "a100", "--rate", "160", "--json", str(out))
    result = run(trace, "--search", "aladdin", *options)
    assert result.exit_code == 0, result.output
    assert "no line of workers over the rate (equation 7)" in json.loads(out.read_bytes())["lines"][-1]


def test_aladdin_fits_no_law_to_one_number_of_devices(trace: Path, tmp_path: Path) -> None:
    config, out = tmp_path / "base.toml", tmp_path / "found.json"
    config.write_text(CONFIG.replace("[1, 2]", "[1]"))
    options = ("--config", str(config), "--devices", "a100", "--rate", "6", "--json", str(out))
    result = run(trace, "--search", "aladdin", *options)
    assert result.exit_code == 0, result.output
    assert "no equation 5" in json.loads(out.read_bytes())["lines"][0]


def test_splitwise_says_what_no_design_can_be_within(trace: Path, tmp_path: Path) -> None:
    config, out = tmp_path / "base.toml", tmp_path / "found.json"
    config.write_text(CONFIG.replace("[1, 2]", "[8]"))
    options = ("--config", str(config), "--devices", "a100-sxm", "--json", str(out), "--max-gpus", "8")
    result = run(trace, "--search", "splitwise", "--rate", "400", *options)
    assert result.exit_code == 0, result.output
    found = json.loads(out.read_bytes())
    assert found["chosen"] == []
    assert re.search(r"within --max-gpus 8: none can with fewer than \d+ GPUs", found["lines"][0])


def test_a_trace_that_is_too_short_for_its_rate_is_told(trace: Path, config: Path) -> None:
    result = run(trace, "--devices", "a100", "--config", str(config), "--rate", "2000")
    assert isinstance(result.exception, ConfigError)
    assert "--rate = 2000.0: is too much for 120 requests" in str(result.exception)


def test_lamina_s_search_asks_for_no_rate(trace: Path, config: Path, tmp_path: Path) -> None:
    out, options = tmp_path / "found.json", ("--config", str(config), "--devices", "a100,h20")
    result = run(trace, "--search", "lamina", *MOST, *options, "--json", str(out))
    assert result.exit_code == 0, result.output
    assert json.loads(out.read_bytes())["rows"]


def test_splitwise_s_search_compares_with_its_reference(trace: Path, tmp_path: Path) -> None:
    config, out = tmp_path / "base.toml", tmp_path / "found.json"
    config.write_text(CONFIG.replace("[1, 2]", "[8]"))
    result = run(
        *(trace, "--search", "splitwise", "--rate", "10", "--config", str(config), "--json", str(out)),
        *("--devices", "a100-sxm,h100-sxm"),
    )
    assert result.exit_code == 0, result.output
    rows = json.loads(out.read_bytes())["rows"]
    assert {row[0] for row in rows} >= {"HH", "baseline h100-sxm"}


@pytest.mark.parametrize("slo", ["ttft=1,tpot=0.0001", "ttft=1,e2e=0.01", "ttft=1,tbt=0.0001", "ttft=0.0001"])
def test_vidur_s_search_keeps_every_objective_that_is_given(
    trace: Path, config: Path, tmp_path: Path, slo: str
) -> None:
    out = tmp_path / "found.json"
    options = ("--rate", "6", "--config", str(config), "--devices", "a100", "--json", str(out))
    result = run(trace, "--search", "vidur", *options, "--slo", slo)
    assert result.exit_code == 0, result.output
    found = json.loads(out.read_bytes())
    assert {row[-1] for row in found["rows"]} == {"no"}
    assert found["lines"] == ["none keeps the objectives at its capacity"]
    assert found["chosen"] == []


def test_vidur_s_picture_is_drawn(trace: Path, config: Path, tmp_path: Path) -> None:
    picture = tmp_path / "front.png"
    result = run(
        *(trace, "--search", "vidur", "--rate", "6", "--config", str(config), "--devices", "a100"),
        *("--plot", str(picture)),
    )
    assert result.exit_code == 0, result.output
    assert picture.read_bytes().startswith(b"\x89PNG")


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
    late = run(trace, *options, "--out", str(out), "--choose", "99")
    assert isinstance(late.exception, ConfigError)
    assert "--choose = 99: must be 1 to " in str(late.exception)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--search", "oracle"), "must be one of distserve-high"),
        (("--search", "splitwise"), "machines are of 8 devices"),
        (("--plot", "front.png"), "is of --search vidur"),
        (("--search", "vidur", "--plot", "front.gif"), "must end in .png"),
        (("--search", "aladdin", "--slo", "ttft=1"), "aladdin needs tpot"),
        (("--search", "distserve-high", *MOST), "distserve-high says how many instances a rate takes"),
        (("--search", "distserve-low", *MOST), "distserve-low says how many instances a rate takes"),
        (("--search", "vidur", *MOST), "vidur says how many instances a rate takes"),
        (("--search", "aladdin", *MOST), "aladdin says how many instances a rate takes"),
    ],
)
def test_a_search_that_cannot_be_is_told(
    trace: Path, config: Path, options: tuple[str, ...], said: str
) -> None:
    result = run(trace, "--rate", "1", "--devices", "a100", "--config", str(config), *options)
    assert isinstance(result.exception, ConfigError)
    assert said in str(result.exception)
