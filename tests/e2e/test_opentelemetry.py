"""One request through a mesh is one trace at a collector, under the span of the client that asked."""

from pathlib import Path

import openai

from tests.e2e.meshes import running_mesh
from tests.otlp_receiver import SeenSpan, otlp_receiver

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
CLIENTS_SPAN = "00f067aa0ba902b7"
PROMPT = "xylophone quokka zeppelin"
OUTPUT_TOKENS = 12
CLOCK_NS = 2e6
"""An event loop's clock counts milliseconds."""
LATE_NS = 50e6
"""By which a room may note an end after its client has read it."""
NAMES = {"gateway.request", "scheduler.queue", "prefill", "kv.transfer", "decode"}
CONFIG = """
[instance]
engine = "emulated"
[telemetry]
otlp_endpoint = "{endpoint}"
"""


def test_a_request_is_one_trace_over_all_services(tmp_path: Path) -> None:
    with otlp_receiver() as receiver:
        with running_mesh(tmp_path / "mesh", config=CONFIG.format(endpoint=receiver.url)) as mesh:
            answer = ask(mesh.url)
            spans = receiver.wait_spans(TRACE_ID, NAMES)
        by_name = {span.name: span for span in spans}
        assert len(spans) == len(by_name) == len(NAMES)
        assert not any(word.encode() in body for word in PROMPT.split() for body in receiver.bodies)
    root = by_name.pop("gateway.request")
    assert root.parent_id == CLIENTS_SPAN
    check_root(root, answer)
    request_id = answer.id.removeprefix("cmpl-")
    for span in by_name.values():
        assert span.parent_id == root.span_id, span
        assert span.attributes["lamella.request.id"] == request_id
        assert root.began_ns - CLOCK_NS <= span.began_ns <= span.ended_ns <= root.ended_ns + LATE_NS, span
    services = {name: span.service for name, span in by_name.items()}
    assert services == {
        "scheduler.queue": "scheduler",
        "prefill": "prefill",
        "kv.transfer": "prefill",
        "decode": "decode",
    }
    assert by_name["kv.transfer"].attributes["lamella.transfer.to"] == "decode-0"
    assert by_name["prefill"].attributes["gen_ai.usage.output_tokens"] == 1
    assert by_name["decode"].attributes["gen_ai.usage.output_tokens"] == OUTPUT_TOKENS - 1
    assert by_name["decode"].attributes["lamella.ending"] == "length"


def ask(url: str) -> openai.types.Completion:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        return client.completions.create(
            model="default",
            prompt=PROMPT,
            max_tokens=OUTPUT_TOKENS,
            temperature=0.5,
            extra_headers={"traceparent": f"00-{TRACE_ID}-{CLIENTS_SPAN}-01"},
            extra_body={"ignore_eos": True},
        )


def check_root(root: SeenSpan, answer: openai.types.Completion) -> None:
    assert (root.service, root.events, root.is_error) == ("gateway", ["first_token"], False)
    assert answer.usage is not None
    wanted = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "lamella",
        "gen_ai.request.max_tokens": OUTPUT_TOKENS,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.response.id": answer.id,
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.input_tokens": answer.usage.prompt_tokens,
        "gen_ai.usage.output_tokens": OUTPUT_TOKENS,
    }
    assert {name: root.attributes[name] for name in wanted} == wanted
