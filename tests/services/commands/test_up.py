"""What `lamella up` makes of its options and its settings."""

from pathlib import Path

import pytest

from common.config import Config, ScalingConfig
from common.errors import ConfigError, LauncherError
from services.commands.options import messages
from services.commands.up import chosen_scaling, ending, example_call, say_stage, tell_of_memory, up
from services.launcher import memory
from services.launcher.launch_plan import LaunchPlan
from services.launcher.state_directory import StateDirectory, locked
from tests.e2e.meshes import running_mesh

OFF = ScalingConfig()


def test_limits_of_scaling_come_from_the_command_line_over_the_file() -> None:
    file = ScalingConfig(policy="dry_run", max_prefill=9)
    assert chosen_scaling(file, False, False, [], []) == file
    chosen = chosen_scaling(file, True, False, ["decode=2"], ["decode=6", "mixed=3"])
    assert chosen == ScalingConfig(policy="on", max_prefill=9, min_decode=2, max_decode=6, max_mixed=3)
    assert chosen_scaling(OFF, True, True, [], []).policy == "dry_run"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((False, False, ["decode=2"], []), "--min = 'decode=2': needs --autoscale"),
        ((False, False, [], ["decode=2", "prefill=3"]), "--max = 'decode=2, prefill=3': needs --autoscale"),
        ((False, True, [], []), "--dry-run = true: needs --autoscale"),
        ((True, False, ["decodes=2"], []), "--min = 'decodes=2': must be ROLE=N"),
        ((True, False, [], ["scheduler=2"]), "--max = 'scheduler': is not scaled by load"),
        ((True, False, [], ["predictor=2"]), "--max = 'predictor': is not scaled by load"),
        ((True, False, [], ["decode=65"]), "decode = 65"),
    ],
)
def test_limits_that_are_none_or_that_nothing_asks_for_are_refused(
    options: tuple[bool, bool, list[str], list[str]], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        chosen_scaling(OFF, *options)


@pytest.mark.parametrize("decode", [1, 64])
def test_it_says_what_memory_there_is_not_before_anything_starts(
    decode: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(memory, "available_memory_bytes", lambda: 3 << 30)
    plan, config = LaunchPlan(decode=decode), Config()
    if decode == 1:
        tell_of_memory(plan, config)
        assert "memory: prefill +1, decode +1, scheduler +1 may take 4.1 GiB" in capsys.readouterr().err
    else:
        with pytest.raises(LauncherError, match=r"decode \+64.* would take 65\.1 GiB"):
            tell_of_memory(plan, config)


def test_heads_that_workers_cannot_share_out_are_refused_before_anything_starts(tmp_path: Path) -> None:
    config = tmp_path / "lamella.toml"
    config.write_text('[instance]\nengine = "emulated"\nattention_partition = "heads"\n')
    state = tmp_path / "state"
    with pytest.raises(ConfigError, match=r"^--attention = 2: must divide the model's 3 KV heads"):
        up(state_dir=state, attention=2, config=config)
    assert not state.exists()


def test_a_second_mesh_is_refused_before_its_model_is_made_ready(tmp_path: Path) -> None:
    state = StateDirectory(tmp_path / "state")
    state.create()
    config = tmp_path / "lamella.toml"
    config.write_text(f'[model]\ndirectory = "{tmp_path}/none"\n')
    with locked(state), pytest.raises(LauncherError, match="already runs"):
        up(state_dir=state.path, config=config)
    with pytest.raises(ConfigError, match=r"model\.directory"):
        up(state_dir=state.path, config=config)


def test_who_ends_it_is_told_what_it_waits_for() -> None:
    assert ending(0, 30.0) == "ending"
    assert ending(1, 30.0) == "ending: 1 request runs, at most 30 s; Ctrl-C again cuts off"
    assert ending(12, 2.5) == "ending: 12 requests run, at most 2.5 s; Ctrl-C again cuts off"


@pytest.mark.parametrize("is_terminal", [True, False])
def test_what_takes_long_is_said_also_where_no_line_can_move(
    is_terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "_force_terminal", is_terminal)
    with messages.status("model") as status:
        say_stage(status, "model: capturing the model (once)")
        assert status.status == ("model: capturing the model (once)" if is_terminal else "model")
    said = capsys.readouterr().err
    assert is_terminal or said == "model: capturing the model (once)\n"


def test_the_example_brings_a_key_where_one_is_wanted() -> None:
    assert "authorization" not in example_call("http://127.0.0.1:8000", wants_keys=False)
    assert "Bearer $OPENAI_API_KEY" in example_call("http://127.0.0.1:8000", wants_keys=True)


def test_servers_that_the_file_names_are_used_and_none_is_started_beside_them(
    nats_url: str, redis_url: str, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("NATS_URL", "REDIS_URL"):
        monkeypatch.delenv(variable, raising=False)
    servers = f'[mesh]\nnamespace = "{namespace}"\nnats_url = "{nats_url}"\nredis_url = "{redis_url}"\n'
    config = f'{servers}[instance]\nengine = "emulated"\n'
    with running_mesh(tmp_path / "mesh", "--prefill", "0", "--decode", "0", config=config) as mesh:
        assert {each["role"] for each in mesh.status()["processes"]} == {"gateway", "scheduler"}
        running = mesh.settings
        assert (running.nats_url, running.redis_url) == (nats_url, redis_url)
