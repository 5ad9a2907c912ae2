"""Services of a profile, and a plan that is followed, beside the real stack; it is as before afterwards."""

import json
import sys
from collections.abc import Iterator

import pytest

from tests.compose.questions import PROMPTS, Answers, ask, metric, wait_nothing_left, wait_said
from tests.compose.stack import COMMAND_TIMEOUT_S, ROOT, Stack

pytestmark = pytest.mark.timeout(2400)

PROFILES = ("--profile", "attention", "--profile", "predictor", "--profile", "mixed")
ADDED = ("attention", "predictor", "mixed")
LAMELLA = (sys.executable, "-m", "services.cli")
PLANNED = """
min_decode = 2
window_s = 2.0
"""


@pytest.fixture(scope="module", autouse=True)
def with_workers(stack: Stack, alone: Answers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Two attention workers, a length predictor, and a scheduler that soon plans two decode instances."""
    assert alone
    directory = tmp_path_factory.mktemp("profiles")
    settings = directory / "compose.toml"
    # The last section is the one about scaling.
    text = (ROOT / "deploy" / "compose.toml").read_text()
    settings.write_text(text.replace("min_decode = 1\n", "") + PLANNED)
    # Read by a user of its own in the containers.
    directory.chmod(0o755)
    override = directory / "override.json"
    override.write_text(json.dumps({"configs": {"lamella": {"file": str(settings)}}}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COMPOSE_FILE", f"docker-compose.yml:{override}")
        patch.setenv("LAMELLA_ATTENTION_WORKERS", "1")
        patch.setenv("LAMELLA_PREDICTOR", "history")
        profiles = ("--profile", "attention", "--profile", "predictor")
        stack.compose(*profiles, "up", "--detach", "--wait", "--scale", "attention=2")
        yield
    stack.compose(*PROFILES, "rm", "--stop", "--force", *ADDED)
    stack.compose("up", "--detach", "--wait")


def test_attention_workers_serve_and_an_autoscaler_follows_the_plan_of_another_decode_instance(
    stack: Stack, alone: Answers
) -> None:
    with stack.begin(*LAMELLA, "autoscale", "--target", "compose") as autoscaler:
        try:
            wait_said(autoscaler, "decode: 1 → 2 (lamella-test-decode-2 ready)")
            # Ctrl-C is ignored where a shell started the tests in the background.
            autoscaler.terminate()
            assert autoscaler.wait(COMMAND_TIMEOUT_S) == 0
        finally:
            autoscaler.kill()
    assert ask(stack, *PROMPTS) == alone
    for container in stack.containers("decode"):
        assert metric(stack, container, "lamella_attention_bindings") == 2
        assert metric(stack, container, "lamella_decode_tokens_total") > 0
    wait_nothing_left(stack)


def test_the_length_predictor_is_asked(stack: Stack) -> None:
    (predictor,) = stack.containers("predictor")
    assert metric(stack, predictor, "lamella_length_predictions_total") > 0


def test_a_mixed_instance_serves_alone(stack: Stack, alone: Answers) -> None:
    stack.compose("--profile", "mixed", "up", "--detach", "--wait", "--no-deps", "mixed")
    stack.compose("stop", "prefill", "decode")
    (mixed,) = stack.containers("mixed")
    assert ask(stack, *PROMPTS) == alone
    assert metric(stack, mixed, "lamella_decode_tokens_total") > 0
