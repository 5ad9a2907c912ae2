"""``lamella compare`` as a user runs it: real meshes of emulated instances, in turn."""

import json
import subprocess
from pathlib import Path

import msgspec

from common.config import ModelConfig
from common.config_file import config_from_tree
from common.model.precision import precision_of
from common.profile import Profile, profile_path, read_profile, write_profile
from services.compare.between import PARTS, TakenPart
from services.compare.comparison import read_comparison
from services.compare.records import RunRecord, read_kept
from services.compare.run import _kinds
from services.launcher.state_directory import StateDirectory, is_locked
from services.model_directory import model_directory
from tests.e2e.meshes import LAMELLA, environment
from tests.services.simulator.performance.test_profiled import made

TIMEOUT_S = 200.0
TEXT = """
name = "small"
length_scale = 0.1
rounds = 1
calibration = ["lpld"]
[settings.instance]
engine = "emulated"
[[workload]]
name = "lpld"
requests = 3
rate_per_s = 20.0
ttft_s = 30.0
tpot_s = 30.0
[[configuration]]
name = "coupled"
instances = { mixed = 1 }
[[configuration]]
name = "knowing"
instances = { prefill = 1, decode = 1 }
knows_lengths = true
[configuration.settings.instance]
decode_admission = "reserve_dynamic"
"""


def compare(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*LAMELLA, "compare", *arguments],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )


def test_what_cannot_be_simulated_is_not_run(tmp_path: Path) -> None:
    file, output = tmp_path / "comparison.toml", tmp_path / "out"
    file.write_text(TEXT.replace('calibration = ["lpld"]\n', ""))
    refused = compare(str(file), "--output", str(output), "--simulate")
    assert refused.returncode == 1
    assert refused.stderr.startswith("error: calibration must be named to simulate")
    assert not output.exists()


def test_meshes_take_turns_at_the_same_requests_and_what_was_run_is_not_run_again(tmp_path: Path) -> None:
    # Too long a path for a socket in it: a mesh's lies elsewhere.
    file, output = tmp_path / "small.toml", tmp_path / ("long" * 20)
    file.write_text(TEXT)
    done = compare(str(file), "--output", str(output))
    assert done.returncode == 0, done.stderr
    assert done.stdout == (output / "table.md").read_text()
    assert "| LPLD | coupled |" in done.stdout
    assert "| LPLD | knowing |" in done.stdout
    assert "<svg" in (output / "picture.svg").read_text()[:500]
    records = read_kept(output / "runs.jsonl", RunRecord, read_comparison(file))
    assert [record.key for record in records] == [(0, "lpld", "coupled"), (0, "lpld", "knowing")]
    assert all(record.load.served == 3 for record in records)
    coupled, knowing = records
    for record in records:
        assert [each.index for each in record.served] == [0, 1, 2]
        assert record.served[0].arrival_s == 0.0
        assert sum(each.output_tokens for each in record.served) == record.load.output_tokens
        assert record.load.ttft is not None
        assert max(each.ttft_s for each in record.served) == record.load.ttft.maximum_s
        counted = {each.role: each.passes for each in record.engines}
        assert counted.keys() == ({"mixed"} if record is coupled else {"prefill", "decode"})
        assert all(
            passes is not None and passes.decodes > 0 for role, passes in counted.items() if role != "prefill"
        )
    assert {use.instance_id for use in coupled.uses} == {"mixed-0"}
    assert {use.instance_id for use in knowing.uses} == {"prefill-0", "decode-0"}
    assert 0 < coupled.resource_time_s <= coupled.duration_s
    assert 0 < knowing.resource_time_s <= 2 * knowing.duration_s
    assert coupled.load.prompt_tokens == knowing.load.prompt_tokens
    assert coupled.load.output_tokens == knowing.load.output_tokens
    assert not any(is_locked(StateDirectory(each)) for each in (output / "meshes").iterdir())
    lengths = [json.loads(line) for line in (output / "lengths.jsonl").read_bytes().splitlines()]
    assert all(line["output_tokens"] >= 1 and line["prompt"] for line in lengths)

    again = compare(str(file), "--output", str(output), "--simulate")
    assert again.returncode == 0, again.stderr
    assert again.stdout == done.stdout + (output / "simulated.md").read_text()
    assert len(again.stdout.splitlines()) == 2 * len(done.stdout.splitlines())
    assert "coupled: " in again.stderr, "what its mesh takes beside the model"
    both = (output / "simulated.md").read_text()
    assert "| knowing |" in both
    of_one = compare(str(file), "--output", str(output), "--simulate", "--configuration", "coupled")
    assert of_one.returncode == 0, of_one.stderr
    one = (output / "simulated.md").read_text()
    assert "| coupled |" in one
    assert "| knowing |" not in one
    assert read_kept(output / "runs.jsonl", RunRecord, read_comparison(file)) == records


def test_no_mesh_is_started_where_nothing_would_end_in_time(tmp_path: Path) -> None:
    file, output = tmp_path / "small.toml", tmp_path / "runs"
    file.write_text(TEXT.replace("requests = 3", "requests = 100"))
    done = compare(str(file), "--output", str(output), "--limit-s", "9")
    assert done.returncode == 0, done.stderr
    assert "no mesh is started: nothing that is left would end within --limit-s 9" in done.stderr
    assert "starting" not in done.stderr
    assert not (output / "meshes").exists()


def test_runs_take_turns_with_passes_of_the_profile(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    # What was made for the model stays, and another's profile is neither found nor replaced.
    for made_before in ("models", "programs", "kernels"):
        there = ModelConfig().cache_directory.expanduser() / made_before
        there.mkdir(parents=True, exist_ok=True)
        (cache / made_before).symlink_to(there)
    workload = TEXT.partition("[[workload]]")[2].partition("[[configuration]]")[0]
    file, output = tmp_path / "real.toml", tmp_path / "runs"
    file.write_text(
        f"""
name = "real"
length_scale = 0.1
rounds = 1
calibration = ["lpld"]
profiled_between = true
[settings.model]
cache_directory = "{cache}"
threads = 1
context_length = 2048
[settings.instance]
kv_bytes = {256 << 20}
[[workload]]{workload}
[[configuration]]
name = "coupled"
instances = {{ mixed = 1 }}
"""
    )
    refused = compare(str(file), "--output", str(output))
    assert refused.returncode == 1, refused.stderr
    assert "was not profiled with these settings" in refused.stderr
    assert "starting" not in refused.stderr
    comparison = read_comparison(file)
    config = config_from_tree(comparison.settings)
    directory, profile = model_directory(config.model), small_profile()
    write_profile(profile_path(config.model, directory, precision_of(config.model).compute), profile)
    done = compare(str(file), "--output", str(output), "--simulate")
    assert done.returncode == 0, done.stderr
    kept = read_kept(output / "passes.jsonl", TakenPart, comparison)
    assert [part.before for part in kept[PARTS:]] == [(0, "lpld", "coupled"), None]
    assert len(kept) == PARTS + 2
    found = read_profile(output / "profiles" / "coupled-between.json")
    assert found is not None
    assert found.step_s != profile.step_s
    assert "| coupled |" in (output / "simulated.md").read_text()
    [record] = read_kept(output / "runs.jsonl", RunRecord, comparison)
    [engine] = record.engines
    assert engine.role == "mixed"
    passes = engine.passes
    assert passes is not None
    assert 0 < passes.gaps < record.load.output_tokens + 3
    assert 0 < passes.decodes + passes.prompts <= record.load.output_tokens
    assert 0 <= passes.waited_s < record.duration_s
    assert 0 < engine.computed_s < record.duration_s
    rests = f"coupled: a pass rests mixed {1e3 * passes.gap_s / passes.gaps:.2f} ms"
    assert rests in done.stderr.replace("\n", " ")


def small_profile() -> Profile:
    """Of few passes, none of them long."""
    profile = made()
    return msgspec.structs.replace(
        profile,
        chunk_s=tuple(each for each in profile.chunk_s if each[0] == 0 and each[1] <= 256),
        step_s=tuple(each for each in profile.step_s if each[0] <= 8 and each[1] <= 256),
    )


def test_a_mesh_is_warmed_up_with_every_kind_of_lengths_once() -> None:
    comparison = read_comparison(Path(__file__).parents[3] / "bench" / "fidelity.toml")
    assert [offer.name for offer in _kinds(comparison)] == ["alone", "streams", "long", "crowd", "mixed"]
