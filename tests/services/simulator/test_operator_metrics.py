"""What each operator of the model took in a run: Vidur 5.2."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from services.cli import app
from services.simulator.cluster import Cluster
from services.simulator.config import Simulated
from services.simulator.metrics import Metrics, measure
from services.simulator.operator_metrics import CHUNKS_ATTENTION, STEPS_ATTENTION
from services.simulator.run import Load, simulate
from tests.services.simulator.meshes import PERFORMANCE, mesh, offered, pool

ROOFLINE = {"kind": "roofline"}
REQUESTS = ((0.0, 300, 50), (0.1, 700, 20), (2.0, 10, 5))


def ran(*pools: dict[str, Any], **sections: Any) -> tuple[Cluster, Metrics]:
    simulated: Simulated = mesh(*pools, **sections)
    cluster = simulate(simulated, Load(offered(*REQUESTS)), has_operators=True)
    return cluster, measure(cluster)


def on_roofline(role: str, **keys: Any) -> dict[str, Any]:
    return pool(role, device="h100", performance=ROOFLINE, **keys)


def busy_s(cluster: Cluster, pool_name: str) -> float:
    return sum(
        each.engine.busy.all_s for each in cluster.lives if cluster.pool_of[each.instance_id] == pool_name
    )


@pytest.mark.parametrize("keys", [{}, {"devices": 2}, {"pipeline": 2}], ids=["one", "tensor", "pipeline"])
@pytest.mark.parametrize("roles", [("mixed",), ("prefill", "decode")], ids=["mixed", "apart"])
def test_operators_come_to_the_time_that_engines_were_busy(roles: tuple[str, ...], keys: Any) -> None:
    cluster, metrics = ran(*(on_roofline(role, **keys) for role in roles))
    for role in roles:
        of_pool = [each for each in metrics.operators if each.pool == role]
        seconds = [each.seconds for each in of_pool]
        # Each stage is busy for its share of a pass.
        stages = keys.get("pipeline", 1)
        assert sum(seconds) == pytest.approx(stages * busy_s(cluster, role))
        assert seconds == sorted(seconds, reverse=True)
        assert sum(each.share for each in of_pool) == pytest.approx(1.0)
        assert ("all_reduce" in {each.operator for each in of_pool}) == ("devices" in keys)
        assert ("send_recv" in {each.operator for each in of_pool}) == ("pipeline" in keys)


def test_their_inputs_are_the_rows_and_the_contexts_of_passes() -> None:
    _, metrics = ran(on_roofline("prefill"), on_roofline("decode"))
    found = {(each.pool, each.operator): each for each in metrics.operators}
    prompts = found["prefill", CHUNKS_ATTENTION]
    # The longest in two chunks, of which the second attends to the first, too.
    assert prompts.passes * prompts.tokens == pytest.approx(300 + 512 + 700 + 10)
    matrices = found["prefill", "matrices"]
    assert matrices.passes * matrices.tokens == pytest.approx(300 + 700 + 10)
    steps = found["decode", STEPS_ATTENTION]
    contexts = (sum(range(prompt + 1, prompt + output)) for _, prompt, output in REQUESTS)
    assert steps.passes * steps.tokens == pytest.approx(sum(contexts))
    assert ("prefill", STEPS_ATTENTION) not in found
    assert ("decode", CHUNKS_ATTENTION) not in found


def test_attention_on_workers_is_the_workers_operator() -> None:
    decode = on_roofline("decode", kv_tokens=None, instance={"attention_workers": 2})
    workers = on_roofline("attention", count=2)
    cluster, metrics = ran(on_roofline("prefill"), decode, workers)
    by_pool = {each.pool: each for each in metrics.operators if each.operator == STEPS_ATTENTION}
    assert list(by_pool) == ["attention"]
    assert cluster.workers is not None
    assert by_pool["attention"].seconds == pytest.approx(sum(cluster.workers.use.busy_s.values()))
    contexts = (sum(range(prompt + 1, prompt + output)) for _, prompt, output in REQUESTS)
    assert by_pool["attention"].passes * by_pool["attention"].tokens == pytest.approx(sum(contexts))
    own = [each for each in metrics.operators if each.pool == "decode"]
    assert sum(each.seconds for each in own) == pytest.approx(busy_s(cluster, "decode"))


def test_a_source_that_does_not_know_operators_says_nothing_of_them() -> None:
    cluster, metrics = ran(on_roofline("prefill"), pool("decode", performance=PERFORMANCE))
    assert {each.pool for each in metrics.operators} == {"prefill"}
    assert cluster.lives[1].engine.busy.all_s > 0


def test_without_being_asked_for_nothing_is_counted() -> None:
    simulated = mesh(on_roofline("mixed"))
    asked, unasked = (
        measure(simulate(simulated, Load(offered(*REQUESTS)), has_operators=has)) for has in (True, False)
    )
    assert asked.operators
    assert not unasked.operators
    assert asked.digest == unasked.digest


def test_the_command_prints_and_writes_them(tmp_path: Path) -> None:
    trace, config, written = (tmp_path / name for name in ("trace.csv", "mesh.toml", "run.json"))
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.0000000,374,44\n")
    text = '[cluster]\nmodel = "smollm2-135m"\n[[pool]]\nname = "both"\nrole = "mixed"\ncount = 1\n'
    sources = {"roofline": 'kind = "roofline"\n', "linear": 'kind = "linear"\nstep_s = 0.02\n'}
    shown = {}
    for name, source in sources.items():
        config.write_text(f'{text}device = "h100"\n[pool.performance]\n{source}')
        command = ["simulate", str(config), "--trace", str(trace), "--operators", "--json", str(written)]
        result = CliRunner().invoke(app, command, catch_exceptions=False)
        assert result.exit_code == 0, result.output
        shown[name] = (result.output, json.loads(written.read_text())["operators"])
    output, operators = shown["roofline"]
    assert {"matrices", CHUNKS_ATTENTION, STEPS_ATTENTION} <= {each["operator"] for each in operators}
    assert "tokens each" in output
    output, operators = shown["linear"]
    assert operators == []
    assert "no pool's source of performance tells operators apart" in output
