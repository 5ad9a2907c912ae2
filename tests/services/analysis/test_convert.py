"""``lamella convert``: what it says about the cuts, as text, JSON and a picture."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec
import pytest
from typer.testing import CliRunner

from common.model.report import LAYOUT_OPERATORS, load_report
from services.analysis.convert_command import ExplanationFile
from services.analysis.slice_classes import fold_slices, ranges
from services.analysis.slice_picture import draw_slices
from services.cli import app
from tests.common.model.conftest import save_tiny

REPOSITORY = Path(__file__).resolve().parents[3]


class Converted:
    """A tiny model, and the command over it with its own cache."""

    def __init__(self, root: Path, family: str) -> None:
        self.directory, self.cache = root / family, root / "cache"
        save_tiny(family, self.directory)

    def run(self, *options: str) -> str:
        arguments = ["convert", str(self.directory), "--dtype", "fp32", *options]
        environment = {"LAMELLA_CACHE": str(self.cache), "COLUMNS": "140"}
        result = CliRunner().invoke(app, arguments, env=environment, catch_exceptions=False)
        assert result.exit_code == 0
        return result.stdout

    def json(self) -> ExplanationFile:
        return msgspec.json.decode(self.run("--json"), type=ExplanationFile)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Converted:
    return Converted(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="module")
def neox(tmp_path_factory: pytest.TempPathFactory) -> Converted:
    return Converted(tmp_path_factory.mktemp("neox"), "gpt-neox")


def test_without_options_it_converts_and_says_where(llama: Converted) -> None:
    said = llama.run().strip()
    conversion = Path(said.removeprefix("converted: "))
    assert conversion.parent == llama.cache / "programs"
    assert {path.name for path in conversion.iterdir()} >= {"slices.py", "manifest.json", "report.json"}


def test_the_explanation_shows_slices_sends_and_cuts(llama: Converted) -> None:
    said = " ".join(llama.run("--explain").split())
    assert "3 attentions, 4 slices" in said
    assert "per token and layer: 384 bytes (Q 128, K 64, V 64, output 128)" in said
    assert "per token over all layers: 1,152 bytes" in said
    assert "Slices 1–2: attention with 4 heads over 2 KV heads of 8 (shown: 1)" in said
    assert "embedding embed_tokens" in said
    assert "linear gate_proj | up_proj" in said
    assert "rotate_heads in model.layers.1.self_attn 128 B" in said
    assert "keeps embedding in model.embed_tokens, 1 × T × 32 128 B" in said
    assert said.count("cos in model.rotary_emb, 1 × 1 × T × 8 (once a step) 32 B") == 3


def test_the_parallel_mlp_is_shown_beside_attention_with_what_it_costs(neox: Converted) -> None:
    said = " ".join(neox.run("--explain").split())
    assert "during attention (4) layer_norm post_attention_layernorm · linear dense_h_to_4h" in said
    assert "256 B/token 128 B/token" in said


def test_the_json_adds_up(llama: Converted) -> None:
    content = llama.json()
    report = content.report
    assert [piece.layer for piece in report.slices] == [0, 1, 2, None]
    for crossing in content.crossings:
        assert crossing.total == crossing.q + crossing.k + crossing.v + crossing.output == 384
    for piece, following in zip(report.slices, report.slices[1:], strict=False):
        kept = sum(each.token_bytes for each in following.context if not each.is_step_constant)
        assert piece.least_bytes == kept
        assert piece.q is not None
        assert piece.q.operator == piece.q_operators - 1
    read = {name: piece.weight_bytes for piece in report.slices for name in piece.weights}
    assert len(read) == 3 * 9 + 2  # tied: the embedding is the head
    assert report.weight_bytes == total_weight_bytes(llama.directory)


def total_weight_bytes(directory: Path) -> int:
    """From the file's own header: 8 bytes of length, then JSON."""
    content = (directory / "model.safetensors").read_bytes()
    header: dict[str, Any] = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    header.pop("__metadata__", None)
    return sum(each["data_offsets"][1] - each["data_offsets"][0] for each in header.values())


@pytest.mark.parametrize("family", ["llama", "neox"])
def test_the_picture_draws_every_operator_and_cut(
    family: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    converted: Converted = request.getfixturevalue(family)
    target = tmp_path / "cut.svg"
    said = converted.run("--svg", str(target))
    assert f"picture: {target}" in said
    root = ElementTree.fromstring(target.read_text())  # our own file
    drawn = [each.get("class") for each in root.iter("{http://www.w3.org/2000/svg}rect")]
    cuts = [each for each in root.iter("{http://www.w3.org/2000/svg}path") if each.get("class") == "cut"]
    report = converted.json().report
    classes = fold_slices(report)
    operators = [operator for each in classes for operator in each.example.operators]
    computing = [operator for operator in operators if operator.name not in LAYOUT_OPERATORS]
    assert drawn.count("box") + drawn.count("heavy") == len(computing)
    assert drawn.count("attention") == len(cuts) == len(classes) - 1
    texts = [each.text or "" for each in root.iter("{http://www.w3.org/2000/svg}text")]
    assert sum(text.startswith("cut: keeps") for text in texts) == len(cuts)
    assert texts.count("→ send Q") == texts.count("→ send K, V") == len(cuts)


def test_a_name_cannot_break_the_picture(llama: Converted) -> None:
    report = llama.json().report
    ElementTree.fromstring(draw_slices("<a & b>", report))  # our own text


def test_a_cached_conversion_is_explained_without_torch(llama: Converted) -> None:
    conversion = llama.json().conversion
    assert load_report(Path(conversion)).slices
    script = (
        "import sys\n"
        "from services.cli import app\n"
        "app(sys.argv[1:], standalone_mode=False)\n"
        "assert not {'torch', 'transformers', 'networkx'} & sys.modules.keys()\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", script, "convert", str(llama.directory), "--dtype", "fp32", "--explain"],
        cwd=REPOSITORY,
        env={"LAMELLA_CACHE": str(llama.cache), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr


def test_a_picture_that_cannot_be_written_is_one_line(llama: Converted) -> None:
    from common.errors import ConfigError

    with pytest.raises(ConfigError, match="cannot be written"):
        llama.run("--svg", str(llama.directory / "missing" / "cut.svg"))


def test_ranges_join_neighbours() -> None:
    assert ranges([0]) == "0"
    assert ranges([1, 2, 3, 5, 7, 8]) == "1–3, 5, 7–8"
