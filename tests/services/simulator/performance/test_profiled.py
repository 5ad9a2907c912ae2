"""Our own profiles: the law, the cases, and this machine as a catalogue's device."""

from pathlib import Path

import msgspec
import pytest

from common.errors import ConfigError
from common.laws import TOKENS, chunk_features, pairs_of, step_features
from common.performance import FittedTime, pass_features
from common.profile import PassTime, Profile, write_profile
from common.shapes import SMOLLM2_135M
from services.profiling.passes import BATCHES, CHUNKS, CONTEXTS
from services.simulator.config import load_simulated
from services.simulator.performance.files import PerformanceFileError
from services.simulator.performance.profiled import (
    LawModel,
    ProfileFit,
    TableModel,
    WithOverhead,
    at_pace,
    machine_device,
    profile_held_out,
    profile_model,
    read_machine_profile,
)
from services.simulator.performance.regression import Regression
from services.simulator.performance.roofline import RooflineModel
from services.simulator.shape import PassShape
from tests.services.simulator.performance.conftest import (
    assert_more_takes_longer,
    assert_steps_are_their_passes,
)

REPOSITORY = Path(__file__).resolve().parents[4]

CHUNK = FittedTime((0.4, 0.05, 0.006), 0.02, 100)
STEP = FittedTime((0.001, 0.002, 0.012), 0.03, 100)


def made(chunk: FittedTime = CHUNK, step: FittedTime = STEP) -> Profile:
    """Of a machine that follows the laws exactly."""
    chunk_s = [
        (before, tokens, CHUNK.seconds(chunk_features(tokens, pairs_of(before, tokens))))
        for tokens in CHUNKS
        for before in (0, 1024)
    ]
    step_s = [
        (batch, context, STEP.seconds(step_features(batch, batch * (context + 1))))
        for batch in BATCHES
        for context in CONTEXTS
    ]
    return Profile(
        model="smollm2",
        dtype="bfloat16",
        machine="2 x CPU",
        measured_on="2026-11-20",
        chunk_s=tuple(chunk_s),
        step_s=tuple(step_s),
        saturation_tokens=256,
        chunk_time=chunk,
        step_time=step,
        chunk_held_out_error=0.04,
        step_held_out_error=0.05,
    )


def open_split(by: ProfileFit, profile: Profile) -> LawModel | TableModel:
    model = profile_model(profile, by)
    assert isinstance(model, LawModel | TableModel)
    return model


def test_the_law_is_what_instances_learn() -> None:
    model = LawModel(CHUNK, STEP)
    step, chunk = PassShape((), 3, 900), PassShape(((100, 256),))
    assert model.pass_s(step) == pytest.approx(STEP.seconds(step_features(3, 900)))
    assert model.pass_s(chunk) == pytest.approx(CHUNK.seconds(chunk_features(256, pairs_of(100, 256))))
    both = PassShape(((100, 256), (0, 64)), 3, 900)
    whole = FittedTime((*CHUNK.coefficients, *STEP.coefficients), 0.0, 0)
    assert model.pass_s(both) == pytest.approx(whole.seconds(pass_features(both.load)))


@pytest.mark.parametrize("by", ["law", "linear"])
def test_passes_take_longer_beside_the_model_and_for_each_token_and_prompt_that_ends(by: ProfileFit) -> None:
    alone, beside = profile_model(made(), by), profile_model(made(), by, 0.002, 0.0001, 0.0007)
    for shape in (
        PassShape((), 5, 5 * 700),
        PassShape(((0, 256),)),
        PassShape(((1024, 512), (0, 32)), 8, 8 * 500, ended=2),
    ):
        more_s = 0.002 + 0.0001 * shape.sequences + 0.0007 * shape.ended
        assert beside.pass_s(shape) == pytest.approx(alone.pass_s(shape) + more_s)
    assert_steps_are_their_passes(beside)
    assert isinstance(beside, LawModel | WithOverhead)
    assert isinstance(alone, LawModel | TableModel)
    assert beside.model_s(5) == pytest.approx(alone.model_s(5) + 0.0025)


@pytest.mark.parametrize("by", ["law", "linear"])
def test_on_a_machine_that_follows_its_laws_both_say_the_same(by: ProfileFit) -> None:
    law, model = LawModel(CHUNK, STEP), profile_model(made(), by)
    for shape in (
        PassShape((), 5, 5 * 700),
        PassShape((), 32, 32 * 3000),
        PassShape(((0, 256),)),
        PassShape(((512, 128),)),
        PassShape(((1024, 512),), 8, 8 * 500),
    ):
        assert model.pass_s(shape) == pytest.approx(law.pass_s(shape), rel=0.02)
    assert_steps_are_their_passes(model)
    assert_more_takes_longer(model)


@pytest.mark.parametrize("by", ["law", "linear"])
def test_at_another_pace_every_pass_takes_so_many_times_as_long(by: ProfileFit) -> None:
    shared = PassTime(((0, 64), (0, 64)), 4, 128, 0.2)
    profile = msgspec.structs.replace(made(), shared_s=(shared,))
    whole, paced = profile_model(profile, by), profile_model(at_pace(profile, 1.3), by)
    for shape in (PassShape(((100, 256), (0, 64)), 3, 900), PassShape(((0, 512),)), PassShape((), 7, 2100)):
        assert paced.pass_s(shape) == pytest.approx(1.3 * whole.pass_s(shape), rel=1e-6)
    assert paced.steps_s(5, 1000, 20) == pytest.approx(1.3 * whole.steps_s(5, 1000, 20), rel=1e-6)


@pytest.mark.parametrize("by", ["law", "linear"])
def test_what_a_process_takes_beside_its_model_is_of_every_pass(by: ProfileFit) -> None:
    bare, model = profile_model(made(), by), profile_model(made(), by, 0.003)
    for shape in (PassShape((), 5, 3500), PassShape(((0, 256), (0, 64))), PassShape(((0, 64),), 8, 4000)):
        assert model.pass_s(shape) == pytest.approx(bare.pass_s(shape) + 0.003)
    assert model.steps_s(5, 3500, 20) == pytest.approx(bare.steps_s(5, 3500, 20) + 20 * 0.003)
    assert model.stages == bare.stages
    assert isinstance(model, LawModel | WithOverhead)
    assert isinstance(bare, LawModel | TableModel)
    assert model.model_s(5) == pytest.approx(bare.model_s(5) + 0.003)
    assert model.attention_s(5, 3500) == bare.attention_s(5, 3500)


@pytest.mark.parametrize("by", ["law", "linear"])
def test_a_step_is_told_in_two(by: ProfileFit) -> None:
    model = open_split(by, made())
    for sequences, context in ((1, 33), (5, 700), (32, 129), (50, 300)):
        tokens = sequences * context
        assert model.attention_s(sequences, tokens) == pytest.approx(0.001 * tokens / 1000)
        assert model.model_s(sequences) == pytest.approx(0.002 * sequences + 0.012)


def test_batches_that_no_straight_line_meets_take_what_was_measured() -> None:
    """From 16 rows on this machine's steps take 10 ms longer."""
    bent = msgspec.structs.replace(
        made(), step_s=tuple((*case, seconds + 0.01 * (case[0] >= 16)) for *case, seconds in made().step_s)
    )
    model, law = (open_split(by, bent) for by in ("linear", "law"))
    for batch, more_s in ((1, 0.0), (8, 0.0), (12, 0.005), (16, 0.01), (32, 0.01)):
        assert model.model_s(batch) == pytest.approx(law.model_s(batch) + more_s)


@pytest.mark.parametrize("step", [(-0.001, 0.0, 0.01), (0.001, 0.0, -0.01), (-0.001, 0.0, -0.01)])
def test_a_law_that_falls_under_nothing_counts_nothing_there(step: tuple[float, float, float]) -> None:
    model = LawModel(CHUNK, FittedTime(step, 0.0, 1))
    for context, steps in ((9000, 3000), (1, 500), (8, 30_000)):
        each = (model.pass_s(PassShape((), 1, context + index)) for index in range(steps))
        assert model.steps_s(1, context, steps) == pytest.approx(sum(each), rel=1e-9, abs=1e-9)


def test_several_chunks_and_decodes_pay_for_a_pass_once() -> None:
    model = TableModel(made())
    one = model.pass_s(PassShape(((0, 256),)))
    two = model.pass_s(PassShape(((0, 256), (0, 256))))
    assert two == pytest.approx(2 * one - CHUNK.coefficients[2])
    step = model.pass_s(PassShape((), 8, 8 * 500))
    both = model.pass_s(PassShape(((0, 256),), 8, 8 * 500))
    assert both == pytest.approx(one + step - STEP.coefficients[2])


def test_passes_that_are_shared_cost_what_was_measured_of_such() -> None:
    tiles = msgspec.structs.replace(made(), key_tile=32)
    bare = TableModel(tiles)

    def taken(chunks: tuple[tuple[int, int], ...], batch: int, more_s: float) -> PassTime:
        seconds = bare.pass_s(PassShape(chunks, batch, batch * 129)) + more_s
        return PassTime(chunks, batch, 128 if batch else 0, seconds)

    shared = (
        taken(((0, 64), (0, 64)), 0, 0.004),
        taken(((0, 64),) * 4, 0, 0.012),
        taken(((0, 64),), 4, 0.003 + 64e-5),
        taken(((0, 256),), 8, 0.003 + 256e-5),
        taken(((61, 61),), 3, 0.003 + 61e-5 + 0.002),
    )
    model = TableModel(msgspec.structs.replace(tiles, shared_s=shared))
    for chunks, batch, more_s in (
        (((0, 100),), 0, 0.0),
        (((0, 100), (256, 80)), 0, 0.004),
        (((0, 100),), 3, 0.003 + 100e-5),
        (((0, 100),) * 3, 3, 0.008 + 0.003 + 300e-5),
        (((45, 100), (7, 20)), 0, 0.004 + 2 * 0.002),
        (((45, 100),), 1, 0.003 + 100e-5 + 0.002),
        ((), 3, 0.0),
    ):
        shape = PassShape(chunks, batch, 600 * batch)
        assert model.pass_s(shape) == pytest.approx(bare.pass_s(shape) + more_s)
    assert_steps_are_their_passes(model)


def test_one_pass_with_decodes_says_what_they_cost_and_nothing_of_tokens_and_no_part_saves_time() -> None:
    """Nor is a part that would fall under nothing made up for by others."""
    tiles = msgspec.structs.replace(made(), key_tile=32)
    bare = TableModel(tiles)

    def model_of(*shared: tuple[PassShape, float]) -> TableModel:
        times = [
            PassTime(each.chunks, each.sequences, 128 if each.sequences else 0, bare.pass_s(each) + more_s)
            for each, more_s in shared
        ]
        return TableModel(msgspec.structs.replace(tiles, shared_s=tuple(times)))

    one = model_of((PassShape(((0, 64),), 4, 4 * 129), 0.003))
    for tokens in (16, 4096):
        shape = PassShape(((0, tokens),), 4, 4 * 129)
        assert one.pass_s(shape) == pytest.approx(bare.pass_s(shape) + 0.003)
    saving = model_of(
        (PassShape(((0, 64), (0, 64))), -0.004),
        (PassShape(((0, 64), (0, 64)), 4, 4 * 129), 0.003),
    )
    two, both = PassShape(((0, 64), (0, 64))), PassShape(((0, 64),), 4, 4 * 129)
    assert saving.pass_s(two) == pytest.approx(bare.pass_s(two))
    assert saving.pass_s(both) == pytest.approx(bare.pass_s(both) + 0.003)


def test_what_passes_off_by_different_shares_say_is_weighed_by_what_they_took() -> None:
    bare = TableModel(made())
    shapes = (PassShape(((0, 64), (0, 64))), PassShape(((0, 256), (0, 256))))
    shared = tuple(
        [PassTime(each.chunks, 0, 0, bare.pass_s(each) + 0.004 * (1 + i)) for i, each in enumerate(shapes)]
    )
    short, long = shared[0].seconds ** -2, shared[1].seconds ** -2
    more_s = (0.004 * short + 0.008 * long) / (short + long)
    shape = PassShape(((0, 100), (256, 80)))
    model = TableModel(msgspec.structs.replace(made(), shared_s=shared))
    assert model.pass_s(shape) == pytest.approx(bare.pass_s(shape) + more_s)


def test_a_chunk_of_one_token_is_computed_as_a_decode() -> None:
    model = TableModel(msgspec.structs.replace(made(), key_tile=32))
    for chunks, sequences, context_tokens, same in (
        (((0, 1),), 0, 0, PassShape((), 1, 1)),
        (((0, 1), (40, 1)), 3, 600, PassShape((), 5, 642)),
        (((0, 1), (40, 20)), 3, 600, PassShape(((40, 20),), 4, 601)),
    ):
        assert model.pass_s(PassShape(chunks, sequences, context_tokens)) == model.pass_s(same)


@pytest.mark.parametrize(
    "chunks",
    [
        ((0, 64), (0, 64)),
        ((0, 32), (512, 64), (0, 32)),
        ((1024, 48), (0, 16)),
        ((0, 4),) * 8,
        ((0, 128),) * 4,
    ],
)
def test_several_chunks_attend_to_their_own_prompts_only(chunks: tuple[tuple[int, int], ...]) -> None:
    """A machine that follows the law, at numbers of tokens in all that were measured."""
    shape = PassShape(chunks)
    law = LawModel(CHUNK, STEP)
    assert TableModel(made()).pass_s(shape) == pytest.approx(law.pass_s(shape), rel=0.002)


def test_long_passes_off_by_a_little_say_little_of_what_a_short_chunk_more_costs() -> None:
    law = LawModel(CHUNK, STEP)

    def taken(chunks: tuple[tuple[int, int], ...], factor: float) -> PassTime:
        return PassTime(chunks, 0, 0, factor * law.pass_s(PassShape(chunks)))

    short = [taken(((0, 4),) * 8, 1.0), taken(((0, 16),) * 4, 1.0), taken(((0, 8),) * 4, 1.0)]
    for factor in (0.98, 1.02):
        long = [
            taken(((0, 256),) * 2, factor),
            taken(((0, 128),) * 2, factor),
            taken(((0, 512),) * 2, factor),
        ]
        model = TableModel(msgspec.structs.replace(made(), shared_s=tuple(short + long)))
        shape = PassShape(((0, 16),) * 2)
        assert model.pass_s(shape) == pytest.approx(law.pass_s(shape), rel=0.02)


def test_earlier_tokens_count_in_whole_tiles_of_keys() -> None:
    tiled, bare = TableModel(msgspec.structs.replace(made(), key_tile=32)), TableModel(made())
    decodes = (2, 260)
    for before, counted in ((0, 0), (1, 32), (96, 96), (97, 128), (128, 128), (131, 160)):
        for rest in (((0, 9),), ()):
            got = tiled.pass_s(PassShape(((before, 64), *rest), *decodes))
            assert got == bare.pass_s(PassShape(((counted, 64), *rest), *decodes))
    assert bare.pass_s(PassShape(((131, 64),))) < tiled.pass_s(PassShape(((131, 64),)))


def test_held_out_cases_are_predicted_by_the_others() -> None:
    chunk, step = profile_held_out(made(), "linear")
    assert (chunk.operator, chunk.samples) == ("chunk", 2 * len(CHUNKS))
    assert (step.operator, step.samples) == ("step", len(BATCHES) * len(CONTEXTS))
    assert chunk.mape < 0.09
    assert step.mape < 0.09
    assert [error.mape for error in profile_held_out(made(), "law")] == [0.04, 0.05]


def test_several_chunks_have_the_rows_of_one_of_all_their_tokens() -> None:
    """Few tokens take less than the law's fixed part."""
    few = tuple((0, tokens, 1e-3 + 2e-4 * tokens) for tokens in (1, 4, 8, 16))
    law_s = {(before, tokens): seconds for before, tokens, seconds in made().chunk_s}
    kept = tuple((*case, seconds) for case, seconds in law_s.items() if case[1] > 16 or case[0])
    model = TableModel(msgspec.structs.replace(made(), chunk_s=(*few, *kept)))
    assert model.pass_s(PassShape(((0, 4),) * 4)) == pytest.approx(
        model.pass_s(PassShape(((0, 16),))), rel=0.01
    )
    fours_s = [model.pass_s(PassShape(((0, 4),) * count)) for count in range(1, 6)]
    assert fours_s == sorted(set(fours_s))
    alone_s = model.pass_s(PassShape(((0, 256),)))
    beside_s = model.pass_s(PassShape(((0, 4), (0, 256))))
    assert beside_s >= alone_s + 0.99 * 4 * CHUNK.coefficients[0] / TOKENS
    assert beside_s == model.pass_s(PassShape(((0, 256), (0, 4))))


def test_more_tokens_than_were_measured_go_on_by_the_law() -> None:
    largest = max(CHUNKS)
    model, law = TableModel(made()), LawModel(CHUNK, STEP)
    for chunks in (((0, largest),) * 3, ((1024, largest), (0, largest)), ((0, largest), (0, 16))):
        shape = PassShape(chunks)
        assert model.pass_s(shape) == pytest.approx(law.pass_s(shape), rel=0.002)


def test_a_chunk_more_never_takes_less_than_its_tokens_say() -> None:
    law = LawModel(CHUNK, STEP)
    shorter = PassTime(((0, 64),) * 2, 0, 0, 0.9 * law.pass_s(PassShape(((0, 64),) * 2)))
    model = TableModel(msgspec.structs.replace(made(), shared_s=(shorter,)))
    more_s = model.pass_s(PassShape(((0, 64), (0, 32)))) - model.pass_s(PassShape(((0, 64),)))
    assert more_s >= 0.99 * 32 * CHUNK.coefficients[0] / TOKENS


def test_a_law_that_says_too_much_of_attention_does_not_take_it_off_several_chunks() -> None:
    """The cases say what attention to others' tokens takes."""
    true = LawModel(CHUNK, STEP)
    per_token, per_pair, fixed = CHUNK.coefficients
    wrong = FittedTime((per_token, 20 * per_pair, fixed), 0.2, 100)
    model = TableModel(msgspec.structs.replace(made(), chunk_time=wrong))
    for chunks in (((0, 512), (0, 512)), ((0, 256),) * 4, ((1024, 512), (0, 256), (0, 256))):
        shape = PassShape(chunks)
        assert model.pass_s(shape) == pytest.approx(true.pass_s(shape), rel=0.002)


def test_tokens_beyond_the_largest_case_take_time_where_the_law_says_none() -> None:
    flat = FittedTime((0.0, 0.0, 0.01), 0.2, 100)
    model = TableModel(msgspec.structs.replace(made(), chunk_time=flat))
    largest = max(CHUNKS)
    times_s = [model.pass_s(PassShape(((0, largest),) * count)) for count in (1, 2, 3)]
    assert times_s[1] >= 1.5 * times_s[0]
    assert times_s[2] >= 2.5 * times_s[0]


@pytest.mark.parametrize("by", ["linear", "forest"])
def test_a_chunk_more_takes_longer_by_every_regression(by: Regression) -> None:
    if by == "forest":
        pytest.importorskip("sklearn")
    model = TableModel(made(), by)
    for chunks in (((0, 64),), ((0, 256),), ((256, 128),)):
        one_s = model.pass_s(PassShape(chunks))
        assert one_s < model.pass_s(PassShape((*chunks, (0, 128))))


def test_the_law_s_held_out_error_is_of_the_chunks_that_it_is_fitted_to() -> None:
    profile = made()
    with_few = msgspec.structs.replace(profile, chunk_s=((0, 4, 0.002), *profile.chunk_s))
    assert profile_held_out(with_few, "law") == profile_held_out(profile, "law")


def test_a_machine_that_reads_weights_of_fewer_bytes_than_it_computes_in_is_no_faster() -> None:
    """Without bf16 products weights in bf16 are computed in fp32: its memory came out twice as fast."""

    def rate_of(profile: Profile) -> float:
        device = machine_device(profile, SMOLLM2_135M, name="mine", memory_gb=32, price_usd_h=0.1)
        return device.memory_gb_s

    wide = msgspec.structs.replace(made(), dtype="float32")
    narrow = msgspec.structs.replace(wide, weight_bytes=2)
    assert rate_of(narrow) == pytest.approx(rate_of(made()))
    assert rate_of(wide) == pytest.approx(2 * rate_of(made()))


def test_this_machine_is_a_device_whose_roofline_is_its_law() -> None:
    device = machine_device(made(), SMOLLM2_135M, name="mine", memory_gb=32, price_usd_h=0.1)
    assert (device.name, device.memory_gb, device.price_usd_h) == ("mine", 32, 0.1)
    assert "smollm2 in bfloat16, 2 x CPU, 2026-11-20" in device.figures_source
    model = RooflineModel(SMOLLM2_135M, device)
    assert model.pass_s(PassShape((), 1, 1)) == pytest.approx(STEP.coefficients[2], rel=0.01)
    assert model.pass_s(PassShape(((0, 1024),))) == pytest.approx(1.024 * CHUNK.coefficients[0], rel=0.35)
    with pytest.raises(ConfigError, match="profile again"):
        machine_device(
            made(step=FittedTime((1.0, 1.0, 0.0), 0.0, 1)),
            SMOLLM2_135M,
            name="mine",
            memory_gb=1,
            price_usd_h=1,
        )


def test_a_written_profile_is_read_and_what_breaks_a_rule_is_named(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    write_profile(path, made())
    assert read_machine_profile(path) == made()
    write_profile(path, msgspec.structs.replace(made(), step_s=((1, 128, 0.1), (2, 128, -0.1))))
    with pytest.raises(PerformanceFileError, match=r"profile.json: key step_s\[1\]: .* a time over 0"):
        read_machine_profile(path)
    write_profile(path, msgspec.structs.replace(made(), shared_s=(PassTime(((0, 8),) * 2, 0, 0, 0.0),)))
    with pytest.raises(PerformanceFileError, match=r"key shared_s\[0\]: .* a time over 0"):
        read_machine_profile(path)
    write_profile(path, msgspec.structs.replace(made(), chunk_s=((0, 16, 0.1),)))
    with pytest.raises(PerformanceFileError, match="key chunk_s: needs two cases"):
        read_machine_profile(path)
    path.write_text("{}")
    with pytest.raises(PerformanceFileError, match="is no profile of this version's `lamella profile`"):
        read_machine_profile(path)
    with pytest.raises(PerformanceFileError, match="cannot be read"):
        read_machine_profile(tmp_path / "absent.json")


def test_the_profile_of_a_card_that_is_kept_can_be_simulated() -> None:
    [pool] = load_simulated(REPOSITORY / "bench" / "h200_profile.toml").pools
    profile = read_machine_profile(REPOSITORY / "bench" / "profiles" / "h200_llama3_8b.json")
    assert profile.machine.startswith("NVIDIA H200, ")
    measured = {(before, tokens): seconds for before, tokens, seconds in profile.chunk_s}
    for chunk in ((0, 512), (1024, 2048), (0, 8192)):
        assert pool.performance.pass_s(PassShape((chunk,))) == pytest.approx(measured[chunk], rel=0.01)
    assert pool.total_blocks * pool.settings.instance.block_size == 262_144
