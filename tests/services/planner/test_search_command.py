"""``lamella plan --search``, from end to end."""

import json
import re
from itertools import islice
from pathlib import Path

import pytest
from typer.testing import CliRunner

from common.devices import A100, DEVICES
from common.errors import ConfigError
from services.bench.arrivals import gamma_arrivals
from services.cli import app
from services.planner import worker_configuration
from tests.services.planner.command_line import CONFIG, run

MOST = ("--objective", "throughput", "--max-gpus", "4")


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
    ("search", "rate", "option", "most", "enough"),
    [
        ("distserve-high", "6", "--max-gpus", "1", "8"),
        ("distserve-low", "6", "--max-gpus", "1", "8"),
        ("vidur", "60", "--max-gpus", "1", "24"),
        ("aladdin", "60", "--max-gpus", "1", "24"),
        ("distserve-high", "6", "--max-cost", "6", "43"),
        ("distserve-low", "6", "--max-power", "300", "2400"),
        ("vidur", "60", "--max-cost", "6", "130"),
        ("aladdin", "60", "--max-power", "300", "7200"),
    ],
)
def test_no_search_names_more_than_allowed(
    trace: Path, config: Path, tmp_path: Path, search: str, rate: str, option: str, most: str, enough: str
) -> None:
    out, files = tmp_path / "found.json", tmp_path / "files"
    options = ("--search", search, "--config", str(config), "--devices", "a100", "--json", str(out))
    # At its capacity Vidur's search lets requests wait for five seconds.
    command = (trace, *options, "--slo", "ttft=20,tpot=0.2", "--rate", rate, "--out", str(files))
    over = run(*command, option, most)
    assert isinstance(over.exception, ConfigError)
    assert "no such deployment was found" in str(over.exception)
    assert not files.exists()
    found = json.loads(out.read_bytes())
    assert found["rows"]
    assert found["chosen"] == []
    assert re.match(rf"none is within {option} {most}: {rate}/s would take \d+ GPUs", found["lines"][-1])
    within = run(*command, option, enough)
    assert within.exit_code == 0, within.output
    pools = json.loads(out.read_bytes())["chosen"]
    each = {"--max-gpus": 1.0, "--max-cost": A100.price_usd_h, "--max-power": A100.power_w or 0.0}[option]
    devices = sum(pool["count"] * pool["kind"].get("tensor", 1) for pool in pools)
    assert 0 < devices * each <= float(enough)


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
    found = json.loads(out.read_bytes())
    assert "no equation 5" in found["lines"][0]
    assert "equation 6's batch is " in found["lines"][1]
    assert "workers are simulated with up to 64" in found["lines"][1]
    assert [row[0] for row in found["rows"]] == ["a100 TP1"]


def test_splitwise_says_what_no_design_can_be_within(trace: Path, tmp_path: Path) -> None:
    config, out = tmp_path / "base.toml", tmp_path / "found.json"
    config.write_text(CONFIG.replace("[1, 2]", "[8]"))
    options = ("--config", str(config), "--devices", "a100-sxm", "--json", str(out), "--max-gpus", "8")
    result = run(trace, "--search", "splitwise", "--rate", "400", *options)
    assert result.exit_code == 0, result.output
    found = json.loads(out.read_bytes())
    assert found["chosen"] == []
    assert re.search(r"within --max-gpus 8: any takes at least \d+ GPUs$", found["lines"][0])


def test_a_trace_that_is_too_short_for_its_rate_is_told(trace: Path, config: Path) -> None:
    result = run(trace, "--devices", "a100", "--config", str(config), "--rate", "2000")
    assert isinstance(result.exception, ConfigError)
    assert "--rate = 2000.0: is too much for 120 requests" in str(result.exception)


def test_lamina_s_search_asks_for_no_rate(trace: Path, config: Path, tmp_path: Path) -> None:
    out, options = tmp_path / "found.json", ("--config", str(config), "--devices", "a100,h20")
    result = run(trace, "--search", "lamina", *MOST, *options, "--json", str(out))
    assert result.exit_code == 0, result.output
    assert json.loads(out.read_bytes())["rows"]


def test_lamina_s_search_needs_neither_a_rate_nor_a_space(trace: Path, tmp_path: Path) -> None:
    """One that has room for no instance of the model changes nothing, and that nobody asks is said."""
    config, out = tmp_path / "space.toml", tmp_path / "found.json"
    config.write_text("[space]\ntensors = [1]\n")
    prices = tmp_path / "prices.toml"
    prices.write_text("a100 = 1.5\n")
    options = ("--search", "lamina", "--devices", "h100,h20", "--model", "llama3-70b", "--json", str(out))
    found = []
    nothing_asks = ("--config", str(config), "--rate", "3", "--burstiness", "0.5", "--prices", str(prices))
    for given in ((), nothing_asks):
        result = run(trace, *options, *given)
        assert result.exit_code == 0, result.output
        assert "nothing is simulated" in result.output
        found.append(json.loads(out.read_bytes()))
    without, ignored = found
    assert without["rows"]
    assert ignored["rows"] == without["rows"]
    unasked = "--rate and --burstiness and [space] and --prices a100"
    said = f"not looked at: {unasked}; ratios are of up to 16 devices (--max-gpus)"
    *first, of_slo = without["lines"]
    assert ignored["lines"] == [*first, said, of_slo]


def test_a_search_says_where_its_trace_is_burstier_than_what_it_simulated(
    tmp_path: Path, config: Path
) -> None:
    bursts, out = tmp_path / "bursts.csv", tmp_path / "found.json"
    arrivals_s = islice(gamma_arrivals(6.0, 1, 0.2), 120)
    rows = [f"2023-11-16 00:{each_s // 60:02.0f}:{each_s % 60:09.6f},200,16" for each_s in arrivals_s]
    bursts.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]) + "\n")
    options = ("--search", "vidur", "--config", str(config), "--devices", "a100", "--json", str(out))
    for given, is_told in (((), True), (("--burstiness", "0.2"), False)):
        result = run(bursts, *options, *given)
        assert result.exit_code == 0, result.output
        lines = json.loads(out.read_bytes())["lines"]
        assert any("burstier than those simulated" in each for each in lines) == is_told


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


@pytest.mark.parametrize(
    ("budget", "machines"),
    [
        (("--max-power", "6500"), {"AA": 2, "baseline a100-sxm": 2, "baseline h100-sxm": 1}),
        (("--max-cost", "60"), {"AA": 3, "HA": 2, "baseline a100-sxm": 3, "baseline h100-sxm": 1}),
        (("--max-cost", "60", "--max-power", "9000"), {"AA": 2, "HA": 2, "baseline a100-sxm": 2}),
    ],
)
def test_splitwise_s_search_has_the_most_throughput_of_equal_power_and_cost(
    trace: Path, tmp_path: Path, budget: tuple[str, ...], machines: dict[str, int]
) -> None:
    """A machine of A100s costs $17.60 and draws 3,200 W, one of H100s $38 and 5,600 W."""
    config, out = tmp_path / "base.toml", tmp_path / "found.json"
    config.write_text(CONFIG.replace("[1, 2]", "[8]"))
    options = ("--config", str(config), "--devices", "a100-sxm,h100-sxm", "--json", str(out))
    result = run(trace, "--search", "splitwise", "--objective", "throughput", *options, *budget)
    assert result.exit_code == 0, result.output
    rows = [dict(zip(columns, row, strict=True)) for columns, row in _rows(out)]
    assert {row["design"]: int(row["GPUs"]) // 8 for row in rows}.items() >= machines.items()
    limits = dict(zip(budget[::2], map(float, budget[1::2]), strict=True))
    assert all(float(row["$/h"]) <= limits.get("--max-cost", 1e9) for row in rows)
    assert all(1e3 * float(row["kW"]) <= limits.get("--max-power", 1e9) for row in rows)
    rates = [float(row["req/s"]) for row in rows]
    assert rates == sorted(rates, reverse=True)


def _rows(path: Path) -> list[tuple[list[str], list[str]]]:
    found = json.loads(path.read_bytes())
    return [(found["columns"], row) for row in found["rows"]]


def test_splitwise_s_search_says_that_it_looks_at_no_objectives(trace: Path, tmp_path: Path) -> None:
    """And asks for none: its own are Table VI's."""
    config, out = tmp_path / "base.toml", tmp_path / "found.json"
    config.write_text(CONFIG.replace("[1, 2]", "[8]"))
    command = ["plan", "--model", "opt-13b", "--trace", str(trace), "--processes", "1", "--rate", "10"]
    command += ["--search", "splitwise", "--config", str(config), "--json", str(out)]
    command += ["--devices", "a100-sxm"]
    found = []
    for slo in ([], ["--slo", "ttft=0.000001"]):
        result = CliRunner().invoke(app, [*command, *slo])
        assert result.exit_code == 0, result.output
        found.append(json.loads(out.read_bytes()))
    without, given = found
    assert given["rows"] == without["rows"]
    said = "--slo is not looked at, Table VI's nine bounds are: --out alone writes it down"
    assert given["lines"] == [*without["lines"], said]


def test_lamina_s_search_says_which_objective_it_looks_at(trace: Path, config: Path, tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    options = ("--search", "lamina", "--config", str(config), "--rate", "1", "--devices", "h100,h20")
    said = []
    for slo in ("tpot=0.05", "ttft=1,tpot=0.05"):
        result = run(trace, *options, "--slo", slo, "--json", str(out))
        assert result.exit_code == 0, result.output
        said.append(json.loads(out.read_bytes())["lines"])
    assert said[1] == [*said[0], "of --slo tpot alone is looked at, as what a step may take"]


def test_lamina_s_ratios_cost_no_more_than_allowed(trace: Path, config: Path, tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    options = ("--search", "lamina", "--config", str(config), "--rate", "1", "--devices", "h100,h20")
    found = []
    for budget in ((), ("--max-cost", "25")):
        result = run(trace, *options, *budget, "--json", str(out))
        assert result.exit_code == 0, result.output
        found.append(json.loads(out.read_bytes())["rows"])
    free, bounded = found
    assert bounded == [row for row in free if _usd_h(row) <= 25.0]
    assert 0 < len(bounded) < len(free)


def _usd_h(row: list[str]) -> float:
    """Of the devices of a ratio, or of so many of one kind."""
    counts = [int(each) for each in re.findall(r"\d+", row[2])]
    return sum(DEVICES[name].price_usd_h * count for name, count in zip(row, counts, strict=False))


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
        (("--search", "vidur", "--objective", "power"), "vidur looks for the most requests per dollar"),
        (("--search", "distserve-low", "--objective", "power"), "distserve-low looks for the most goodput"),
        (("--search", "lamina", "--objective", "power"), "lamina looks for the most tokens per dollar"),
        (
            ("--search", "vidur", "--attainment", "0.9"),
            "--attainment = 0.9: is not looked at with --search vidur: percentiles of its own",
        ),
        (("--search", "splitwise", "--attainment", "0.99"), "--search splitwise: Table VI's percentiles"),
        (("--search", "lamina", "--attainment", "0.99"), "--search lamina: by the cost model alone"),
        (("--search", "oracle", "--attainment", "0.9"), "must be one of distserve-high"),
        (("--search", "splitwise", "--max-cost", "30"), "is in the space within --max-cost 30"),
    ],
)
def test_a_search_that_cannot_be_is_told(
    trace: Path, config: Path, options: tuple[str, ...], said: str
) -> None:
    result = run(trace, "--rate", "1", "--devices", "a100", "--config", str(config), *options)
    assert isinstance(result.exception, ConfigError)
    assert said in str(result.exception)
