"""Sources as a TOML file says them, opened to models behind the one interface."""

import dataclasses
import tomllib
from pathlib import Path

import msgspec
import pytest

from common.devices import A100_SXM
from common.errors import ConfigError
from common.profile import write_profile
from common.shapes import CODELLAMA_34B, SMOLLM2_135M
from services.simulator.performance.linear import LinearPerformance
from services.simulator.performance.roofline import Parallelism
from services.simulator.performance.sources import (
    LinearSource,
    PerformanceSource,
    ProfileSource,
    RooflineSource,
    open_source,
    read_source,
)
from services.simulator.shape import PassShape
from tests.services.simulator.performance.conftest import mean_error
from tests.services.simulator.performance.test_profiled import made

SHAPE = PassShape(((256, 512),), 16, 16 * 900)


def source_of(text: str, beside: Path = Path()) -> PerformanceSource:
    return read_source("performance", tomllib.loads(text), beside)


def test_every_published_source_opens_and_says_how_good_it_is(shared_directory: Path) -> None:
    data = shared_directory / "data"
    vidur = data / "vidur/profiling"
    texts = {
        "vidur": f"""
            kind = "vidur"
            mlp = "{vidur}/compute/a100/codellama/CodeLlama-34b-Instruct-hf/mlp.csv.gz"
            attention = "{vidur}/compute/a100/attention_tp2_embd8192_q64_kv8.csv.gz"
            all_reduce = "{vidur}/network/a100_pairwise_nvlink/all_reduce.csv.gz"
        """,
        "aiconfigurator": f"""
            kind = "aiconfigurator"
            directory = "{data}/aiconfigurator/a100_sxm"
        """,
        "roofline": 'kind = "roofline"',
    }
    times = {}
    for kind, text in texts.items():
        opened = open_source(source_of(text), CODELLAMA_34B, A100_SXM, Parallelism(tensor=2))
        times[kind] = opened.model.pass_s(SHAPE)
        errors = opened.held_out()
        assert (kind == "roofline") == (errors == ())
        assert not errors or mean_error(errors) < 0.09
    assert times["aiconfigurator"] == pytest.approx(times["vidur"], rel=0.2)
    assert times["roofline"] == pytest.approx(times["vidur"], rel=0.3)


@pytest.mark.parametrize("is_corrected", [True, False])
def test_splitwises_table_opens_as_published_and_corrected(
    shared_directory: Path, is_corrected: bool
) -> None:
    source = source_of(
        f"""
        kind = "splitwise"
        path = "{shared_directory}/data/splitwise/perf_model.csv"
        model = "llama2-70b"
        hardware = "a100-80gb"
        is_corrected = {str(is_corrected).lower()}
        """
    )
    opened = open_source(source, CODELLAMA_34B, A100_SXM, Parallelism(tensor=2))
    longer = PassShape((), 64, 64 * 4000)
    assert (opened.model.pass_s(longer) > opened.model.pass_s(PassShape((), 64, 64))) == is_corrected
    assert mean_error(opened.held_out()) < 0.05
    with pytest.raises(ConfigError, match="splitwise measured no pipelines"):
        open_source(source, CODELLAMA_34B, A100_SXM, Parallelism(tensor=2, pipeline=2))


def test_distserves_constants_open(shared_directory: Path) -> None:
    text = f"""
        kind = "distserve"
        path = "{shared_directory}/data/distserve/profiler-a100-80g.distserve.json"
        model = "facebook/opt-13b"
    """
    opened = open_source(source_of(text), CODELLAMA_34B, A100_SXM, Parallelism(tensor=2, pipeline=3))
    assert opened.model.stages == 3
    assert opened.held_out() == ()


def test_our_own_profile_opens_as_it_was_measured(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    write_profile(path, made())
    opened = open_source(ProfileSource(path=path), SMOLLM2_135M, A100_SXM, Parallelism())
    assert opened.model.pass_s(SHAPE) > 0
    assert [error.operator for error in opened.held_out()] == ["chunk", "step"]
    with pytest.raises(ConfigError, match="profile with this parallelism"):
        open_source(ProfileSource(path=path), SMOLLM2_135M, A100_SXM, Parallelism(tensor=3))


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (RooflineSource(compute=0), "compute = 0: must be a share"),
        (RooflineSource(memory=1.5), "memory = 1.5: must be a share"),
        (RooflineSource(dtype="fp3"), "dtype = 'fp3': must be one of bf16"),
    ],
)
def test_impossible_rooflines_are_refused(source: RooflineSource, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        open_source(source, SMOLLM2_135M, A100_SXM, Parallelism())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("step_s = -0.02", "step_s = -0.02: must be 0 or more"),
        ("per_prompt_token_s = nan", "per_prompt_token_s = nan: must be 0 or more"),
        ("per_context_token_s = inf", "per_context_token_s = inf: must be 0 or more"),
    ],
)
def test_impossible_times_of_a_linear_law_are_refused(text: str, said: str) -> None:
    source = source_of(f'kind = "linear"\nprefill_s = 0.01\n{text}')
    with pytest.raises(ConfigError, match=said):
        open_source(source, SMOLLM2_135M, None, Parallelism())


@pytest.mark.parametrize("factor", ["0.0", "-1.1", "nan", "inf"])
def test_an_impossible_factor_of_batches_is_refused(factor: str) -> None:
    source = source_of(f'kind = "vidur"\nmlp = "a.csv"\nattention = "b.csv"\nbatch_factor = {factor}')
    with pytest.raises(ConfigError, match=r"batch_factor = .*: must be over 0"):
        open_source(source, SMOLLM2_135M, None, Parallelism())


def test_a_linear_law_is_what_a_user_writes() -> None:
    fields = {each.name: each.default for each in dataclasses.fields(LinearPerformance)}
    written = {each.name: each.default for each in msgspec.structs.fields(LinearSource)}
    assert written == fields
    for number, key in enumerate(fields, 1):
        source = source_of(f'kind = "linear"\n{key} = {number}.5')
        opened = open_source(source, SMOLLM2_135M, None, Parallelism())
        assert opened.model == LinearPerformance(**{key: number + 0.5})


def test_unknown_kinds_and_keys_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"performance\.kind = 'crystal ball': must be one of linear, "):
        source_of('kind = "crystal ball"')
    with pytest.raises(ConfigError, match=r"performance\.tenser = 2: is not a known key"):
        source_of('kind = "roofline"\ntenser = 2')
    with pytest.raises(ConfigError, match=r"performance\.path = 5: must be the path of a file"):
        source_of('kind = "profile"\npath = 5')


def test_relative_paths_start_at_the_file_that_names_them(tmp_path: Path) -> None:
    text = 'kind = "profile"\npath = "measured/profile.json"'
    assert source_of(text, tmp_path) == ProfileSource(path=tmp_path / "measured/profile.json")
    absolute = f'kind = "profile"\npath = "{tmp_path}/profile.json"'
    assert source_of(absolute, Path("elsewhere")) == ProfileSource(path=tmp_path / "profile.json")
