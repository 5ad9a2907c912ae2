"""``lamella analyze`` in a process of its own: tables, JSON, and one clear line for what cannot be."""

import json
import os
import struct
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from common.cost import PLAIN_ROOFLINE, Utilisation
from common.devices import H20
from common.errors import ModelError
from common.shapes import LLAMA3_70B
from services.analysis.model_shape import read_shape
from services.analysis.paper_statements import check_statements, table_3

ROOT = Path(__file__).resolve().parents[3]
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 10,
    "max_position_embeddings": 64,
}
TENSORS = {"model.embed_tokens.weight": [10, 8], "model.norm.weight": [8], "lm_head.weight": [10, 8]}


def run_command(*arguments: str | Path) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-m", "services.cli", "analyze", *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "220"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    return done.returncode, done.stdout, done.stderr


def run_json(*arguments: str | Path) -> Any:
    status, out, err = run_command(*arguments, "--json")
    assert status == 0, err
    return json.loads(out)


def directory_with(
    tmp_path: Path, config: Mapping[str, object], tensors: Mapping[str, list[int]] = TENSORS
) -> Path:
    directory = tmp_path / "tiny"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({**CONFIG, **config}))
    entries = {
        name: {"dtype": "BF16", "shape": shape, "data_offsets": [0, 0]} for name, shape in tensors.items()
    }
    header = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    return directory


def test_a_named_model_prints_every_table_and_the_papers_statements() -> None:
    status, out, err = run_command("llama3-70b")
    assert status == 0, err
    for word in ("All but attention", "Attention", "Least bandwidth", "Largest batch", "tokens per dollar"):
        assert word in out
    for word in ("327,680 bytes of KV", "holds", "does not hold", "Offloading, Table 3", "2 h100 + 4 h20"):
        assert word in out


def test_json_holds_every_combination_that_was_asked_for() -> None:
    report = run_json("llama3-70b", "--devices", "H100,h20", "--batch", "1,300", "--context", "4096,8192")
    analysis = report["analysis"]
    assert analysis["kv_token_bytes"] == 327_680
    assert len(analysis["model_points"]) == 2 * 2
    assert len(analysis["attention_points"]) == 2 * 2 * 2
    assert len(analysis["link_points"]) == 2 * 2 * 2
    alone = {(p["device"], p["context"]): p["kv_alone"] for p in analysis["batch_points"]}
    assert alone == {("h100", 4096): 59, ("h100", 8192): 29, ("h20", 4096): 71, ("h20", 8192): 35}
    kinds = {point["kind"] for point in analysis["throughput_points"]}
    assert kinds == {"homogeneous", "disaggregated", "staggered"}
    (priced,) = (
        point["result"]["price_usd_h"]
        for point in analysis["throughput_points"]
        if (point["kind"], point["context"]) == ("staggered", 8192)
        and (point["result"]["a"], point["result"]["b"]) == (2, 4)
    )
    assert priced == pytest.approx(40.64)


def test_one_device_computes_both_parts_and_slack_is_an_argument() -> None:
    def needed(*options: str) -> dict[str, float]:
        report = run_json("llama-65b", "--devices", "a100", "--batch", "8", "--context", "512", *options)
        return {point["assumptions"]: point["gb_s"] for point in report["analysis"]["link_points"]}

    own, halved = needed(), needed("--slack", "0.1")
    assert halved["disaggregation"] == pytest.approx(2 * own["disaggregation"])
    assert halved["offloading"] == pytest.approx(10 * own["offloading"])


def test_a_device_of_one_s_own_is_analysed_beside_the_catalogue_s(tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    figures = {**asdict(H20), "name": "mine", "power_w": 100.0, "memory_gb_s": 2000.0}
    own.write_text("[[device]]\n" + "".join(f"{key} = {json.dumps(each)}\n" for key, each in figures.items()))
    options = ("--batch", "8", "--context", "512", "--device-file", own)
    report = run_json("llama3-70b", "--devices", "h20,mine", *options)["analysis"]
    theirs, ours = (
        run_json("llama3-70b", "--devices", f"h100,{name}", *options)["analysis"]["attention_points"][-1]
        for name in ("h20", "mine")
    )
    assert [each["name"] for each in report["config"]["devices"]] == ["h20", "mine"]
    assert ours["step_s"] == pytest.approx(2 * theirs["step_s"])
    status, _, err = run_command("llama3-70b", "--devices", "yours", "--device-file", own)
    assert status != 0
    assert "a40, mine" in err


def test_a_smaller_element_halves_the_kv() -> None:
    assert run_json("smollm2-135m", "--dtype", "fp8")["analysis"]["kv_token_bytes"] == 23_040 // 2


def test_a_directory_is_read_without_its_weights(tmp_path: Path) -> None:
    shape = read_shape(str(directory_with(tmp_path, {"tie_word_embeddings": False})))
    assert (shape.name, shape.layers, shape.heads, shape.kv_heads, shape.head_dim) == ("tiny", 2, 4, 2, 2)
    assert (shape.parameters, shape.lookup_parameters) == (168, 80)
    report = run_json(tmp_path / "tiny", "--devices", "rtx-3090")
    assert report["analysis"]["weight_bytes"] == 2 * 168


def test_of_a_usual_family_the_config_alone_is_enough(tmp_path: Path) -> None:
    published = {
        "model_type": "llama",
        "num_hidden_layers": 80,
        "hidden_size": 8192,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 28672,
        "vocab_size": 128256,
        "tie_word_embeddings": False,
    }
    directory = directory_with(tmp_path, published)
    (directory / "model.safetensors").unlink()
    assert read_shape(str(directory)) == replace(LLAMA3_70B, name="tiny")
    (directory / "config.json").write_text(json.dumps({**CONFIG, **published, "model_type": "jamba"}))
    with pytest.raises(ModelError, match=r"no \*\.safetensors weights"):
        read_shape(str(directory))


def test_a_tied_matrix_counts_once(tmp_path: Path) -> None:
    shape = read_shape(str(directory_with(tmp_path, {"tie_word_embeddings": True})))
    assert (shape.parameters, shape.lookup_parameters) == (88, 0)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("llama3-70b", "--devices", "h100,h999"), ("--devices", "'h999'", "h100, h20")),
        (("llama3-70b", "--devices", "h100,h100"), ("--devices", "'h100'", "once")),
        (("llama-7b",), ("MODEL", "'llama-7b'", "llama3-70b")),
        (("llama3-70b", "--batch", "1,none"), ("--batch", "'1,none'", "whole numbers")),
        (("llama3-70b", "--context", "0"), ("--context", "'0'", "from 1")),
        (("llama3-70b", "--ratio", "2"), ("--ratio", "'2'", "a:b")),
        (("llama3-70b", "--dtype", "fp3"), ("--dtype", "'fp3'", "bf16")),
        (("llama3-70b", "--slack", "nan"), ("--slack", "nan", "above 0")),
        (("llama3-70b", "--mfu", "1.5"), ("--mfu", "1.5", "at most 1")),
    ],
)
def test_what_cannot_be_is_one_line_with_key_value_and_rule(
    arguments: tuple[str, ...], words: tuple[str, ...]
) -> None:
    status, out, err = run_command(*arguments)
    assert status in (1, 2)
    assert out == ""
    assert err.count("\n") == 1
    for word in words:
        assert word in err


def test_a_directory_that_cannot_be_analysed_is_one_line(tmp_path: Path) -> None:
    directory = directory_with(tmp_path, {"num_local_experts": 8})
    status, _, err = run_command(directory)
    assert status == 1
    assert "num_local_experts = 8: a mixture of experts" in err
    (directory / "config.json").write_text(json.dumps(CONFIG))
    (directory / "model.safetensors").write_bytes(b"\xff" * 64)
    status, _, err = run_command(directory)
    assert status == 1
    assert err.count("\n") == 1
    assert "not a safetensors file" in err


def test_the_papers_statements_have_the_verdicts_that_the_roofline_gives() -> None:
    verdicts = {(one.unit, one.reading): one.holds for one in check_statements(PLAIN_ROOFLINE)}
    assert verdicts["GB/s", "context 8192, DOP (1, 1), each H100's link"]
    assert not verdicts["GB/s", "context 4096, DOP (1, 1), each H100's link"]
    assert not verdicts["GB/s", "context 8192, DOP (2, 4), each H100's link"]
    assert verdicts["%", "llama-13b, batch 128, a100, context 1501"]
    assert verdicts["%", "llama-13b, batch 512, a100, context 1501"]
    assert not verdicts["%", "llama3-70b, batch 300, h100, context 1501"]
    assert verdicts["requests", "LLaMA3-70B, 80 GB, no weights"]


def test_a_slower_machine_needs_a_slower_link() -> None:
    """At 80 % of both peaks every reading of the 30 GB/s at context 8192 holds."""
    readings = [
        one
        for one in check_statements(Utilisation(0.8, 0.8))
        if one.unit == "GB/s" and one.reading.startswith("context 8192")
    ]
    assert len(readings) == 2
    assert all(one.holds for one in readings)


def test_table_3_is_shown_with_what_it_implies_and_never_fitted() -> None:
    entries = {(entry.model, entry.batch): entry for entry in table_3(PLAIN_ROOFLINE)}
    assert len(entries) == 12
    entry = entries["llama-13b", 1024]
    assert entry.paper_gb_s == 10.06
    assert entry.implied_mfu == pytest.approx(0.506, abs=1e-3)
    assert entry.roofline_mfu == pytest.approx(1.0)
    assert entry.roofline_gb_s == pytest.approx(19.89, abs=1e-2)
    assert all(one.implied_mfu < one.roofline_mfu for one in entries.values())
