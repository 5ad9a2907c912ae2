"""What is impossible of a cluster is refused by key, value and rule."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError
from common.shapes import SHAPES
from services.simulator.config import DEFAULT_MODEL, load_simulated, simulated_from_tree
from tests.services.simulator.meshes import PERFORMANCE, SHAPE, mesh, pool


@pytest.mark.parametrize("share", [0.0, -0.5, 1.01, 9.0, float("nan"), float("inf")])
def test_a_device_has_no_more_memory_than_all_of_its_own(share: float) -> None:
    with pytest.raises(ConfigError, match="must be over 0 and at most 1") as caught:
        mesh(pool("mixed"), cluster={"memory_share": share})
    assert caught.value.key == "cluster.memory_share"
    assert str(caught.value.value) == str(share)
    assert mesh(pool("mixed"), cluster={"memory_share": 1.0}).cluster.memory_share == 1.0


@pytest.mark.parametrize(
    ("sizes", "key", "rule"),
    [
        *(
            ({field: size}, field, "must be at least 1")
            for field in sorted(SHAPE.keys() - {"name", "lookup_parameters"})
            for size in (0, -4)
        ),
        ({"kv_heads": 3}, "kv_heads", "must divide cluster.shape.heads = 4"),
        ({"lookup_parameters": -1}, "lookup_parameters", "must be 0 or more"),
        ({"lookup_parameters": 1_000_000}, "lookup_parameters", "under cluster.shape.parameters = 1000000"),
    ],
)
def test_a_shape_that_no_model_has_is_refused(sizes: dict[str, Any], key: str, rule: str) -> None:
    with pytest.raises(ConfigError, match=rule) as caught:
        mesh(pool("mixed"), cluster={"shape": SHAPE | sizes})
    assert (caught.value.key, caught.value.value) == (f"cluster.shape.{key}", sizes[key])


def test_a_model_is_given_by_its_name_or_by_its_shape() -> None:
    assert simulated_from_tree({"pool": [pool("mixed")]}).shape == SHAPES[DEFAULT_MODEL]
    assert mesh(pool("mixed")).shape.name == SHAPE["name"]
    with pytest.raises(ConfigError, match=r"cannot be said beside \[cluster\.shape\]") as caught:
        simulated_from_tree({"cluster": {"model": "llama3-8b", "shape": {}}, "pool": [pool("mixed")]})
    assert (caught.value.key, caught.value.value) == ("cluster.model", "llama3-8b")


def test_a_pool_is_named_whose_passes_would_take_less_than_nothing() -> None:
    with pytest.raises(ConfigError, match="must be 0 or more") as caught:
        mesh(pool("mixed", performance=PERFORMANCE | {"step_s": -0.02}))
    assert (caught.value.key, caught.value.value) == ("pool.mixed.performance.step_s", -0.02)


def test_a_pool_without_a_performance_is_told_of_which_there_are() -> None:
    with pytest.raises(ConfigError, match="must be given, one of linear, roofline, ") as caught:
        mesh(pool("mixed", performance={}))
    assert caught.value.key == "pool.mixed.performance.kind"
    with pytest.raises(ConfigError, match="must be given, one of linear, roofline, "):
        simulated_from_tree({"pool": [{"name": "mixed", "role": "mixed", "count": 1, "kv_tokens": 4096}]})


def test_a_pool_without_a_role_is_told_of_all_of_them() -> None:
    with pytest.raises(
        ConfigError, match="must be given, one of prefill, decode, mixed, attention"
    ) as caught:
        simulated_from_tree({"pool": [{"name": "some", "count": 1, "kv_tokens": 4096}]})
    assert caught.value.key == "pool.some.role"


@pytest.mark.parametrize(("key", "value"), [("devices", 3), ("pipeline", 1000)])
def test_a_pool_s_parallelism_is_named_as_its_file_has_it(key: str, value: int) -> None:
    performance = {"kind": "roofline"}
    with pytest.raises(ConfigError) as caught:
        mesh(pool("mixed", performance=performance, device="h100", kv_tokens=1000, **{key: value}))
    assert (caught.value.key, caught.value.value) == (f"pool.mixed.{key}", value)


@pytest.mark.parametrize(
    ("table", "said"),
    [
        (
            '[[pool]]\nname = "a"\nrole = "banana"\ncount = 1\nperformance = {}',
            "pool.a.role = 'banana': must be one of prefill, decode, mixed, attention",
        ),
        (
            '[[pool]]\nname = "a"\nrole = "mixed"\ncount = "x"\nperformance = {}',
            "pool.a.count = 'x': must be a whole number",
        ),
        ('[[pool]]\nname = "a"\nrole = "mixed"\nperformance = {}', "pool.a.count must be given"),
        (
            '[cluster.shape]\nname = "mine"\nlayers = 2\nheads = 4\nkv_heads = 4\nhead_dim = 16',
            "cluster.shape.hidden_size must be given"
            " (and intermediate_size, vocab_size, parameters, lookup_parameters)",
        ),
        (
            "[cluster.shape]\nname = 'mine'\nlayers = 2.5",
            "cluster.shape.layers = 2.5: must be a whole number",
        ),
        (
            "[cluster.shape]\nkvheads = 8",
            "cluster.shape.kvheads = 8: is not a known key: did you mean kv_heads?",
        ),
        ("[cluster]\nhopp_s = 1", "cluster.hopp_s = 1: is not a known key: did you mean hop_s?"),
        ('model = "llama3-70b"', "model = 'llama3-70b': is a key of [cluster], and stands in no table"),
    ],
)
def test_what_breaks_a_rule_is_named_by_its_key_and_shown_by_itself(table: str, said: str) -> None:
    with pytest.raises(ConfigError) as told:
        simulated_from_tree(tomllib.loads(table))
    assert str(told.value).startswith(said)


def test_a_mesh_that_could_answer_nobody_is_refused(tmp_path: Path) -> None:
    """Nothing would be drawn; a planner's single phases are simulated nevertheless."""
    pools = [pool("decode", name="a"), pool("decode", name="b")]
    assert mesh(*pools).pools
    file = tmp_path / "mesh.toml"
    keys = 'role = "decode"\ncount = 1\nkv_tokens = 1000\nperformance = { kind = "linear" }\n'
    table = f'[[pool]]\nname = "NAME"\n{keys}'
    file.write_text("".join(table.replace("NAME", name) for name in "ab"))
    said = r"pool\.role = 'decode, decode': leave nobody for prefill"
    with pytest.raises(ConfigError, match=said) as caught:
        load_simulated(file)
    assert str(caught.value).startswith(f"{file}: pool.role"), "one of several may be meant"


def test_pools_have_no_more_than_can_be_simulated() -> None:
    with pytest.raises(ConfigError, match=r"pool.mixed.count = 10000000: must be 1 to 10,000"):
        mesh(pool("mixed", 10_000_000))


def test_a_model_is_read_from_its_directory_beside_the_file(tmp_path: Path) -> None:
    published = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 3,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 1_000,
        "max_position_embeddings": 4_096,
    }
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text(json.dumps(published))
    tree = {"cluster": {"model": "mine"}, "pool": [pool("mixed")]}
    shape = simulated_from_tree(tree, tmp_path).shape
    assert (shape.layers, shape.kv_heads, shape.intermediate_size, shape.vocab_size) == (3, 2, 128, 1_000)
    with pytest.raises(ConfigError, match=r"must be a model's directory or one of .*llama3-70b") as caught:
        simulated_from_tree(tree, tmp_path / "elsewhere")
    assert (caught.value.key, caught.value.value) == ("cluster.model", "mine")
