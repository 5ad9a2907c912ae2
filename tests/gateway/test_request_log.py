"""What a gateway logs of a call: ids, counts and times, in one line."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from common.errors import HandoverFailed, InternalError
from tests.gateway.clients import in_background, whole, with_peer
from tests.gateway.conftest import gateway_config
from tests.gateway.processes import running_gateway, send
from tests.gateway.scripted import ScriptedPeer

CLIENTS_ID = "the-client-s.own_ID"


@pytest.mark.parametrize("log_calls", [True, False])
def test_a_call_is_one_line_with_the_client_s_id_and_the_mesh_s(
    log_calls: bool, nats_url: str, redis_url: str, tmp_path: Path
) -> None:
    """Of two choices one is continued and ends, the other fails."""
    ids: list[str] = []

    async def script(peer: ScriptedPeer) -> None:
        call = in_background(whole(gateway, n=2, extra_headers={"x-request-id": CLIENTS_ID}))
        first, second = sorted(
            [await peer.next_request() for _ in range(2)], key=lambda each: each.request_id
        )
        ids.extend([first.request_id, second.request_id])
        peer.fail(first, HandoverFailed("once"), can_continue=True)
        peer.tokens(await peer.next_request(), [20, 21, 22], finish="length")
        peer.fail(second, InternalError("a defect"), can_continue=False)
        with pytest.raises(Exception, match="internal"):
            await call

    config = gateway_config(nats_url, redis_url)
    config = msgspec.structs.replace(
        config, gateway=msgspec.structs.replace(config.gateway, log_calls=log_calls)
    )
    with running_gateway(config, tmp_path) as gateway:
        with_peer(gateway, script)
    lines = [json.loads(line) for line in (tmp_path / "gateway.log").read_text().splitlines()]
    told: list[dict[str, Any]] = [line for line in lines if line["event"] == "call_ended"]
    assert len(told) == log_calls
    for line in told:
        assert (line["http_request"], line["requests"]) == (CLIENTS_ID, ids)
        assert line["endings"] == ["length", "internal_error"]
        assert (line["prompt_tokens"], line["output_tokens"], line["attempts"]) == (3, 3, 3)
        assert 0 < line["ttft_s"] < line["duration_s"]
    [continued] = [line for line in lines if line["event"] == "sequence_continued"]
    assert continued["request"] == ids[0]
    [refused] = [line for line in lines if line["event"] == "request_refused"]
    assert refused["http_request"] == CLIENTS_ID


@pytest.mark.parametrize("log_calls", [True, False])
def test_a_refusal_is_one_line_with_the_field_and_without_what_the_client_wrote(
    log_calls: bool, nats_url: str, redis_url: str, tmp_path: Path
) -> None:
    config = gateway_config(nats_url, redis_url)
    config = msgspec.structs.replace(
        config, gateway=msgspec.structs.replace(config.gateway, log_calls=log_calls)
    )
    header = {"x-request-id": CLIENTS_ID}
    with running_gateway(config, tmp_path) as gateway:
        url = f"{gateway.url}/v1/completions"
        send(url, {"model": "default", "prompt": "Hi", "logit_bias": {"zeppelin": 1}}, header)
        send(url, {"model": "zeppelin", "prompt": "Hi"}, header)
        send(f"{gateway.url}/zeppelin", None, header)
    log = (tmp_path / "gateway.log").read_text()
    told = [line for line in map(json.loads, log.splitlines()) if line["event"] == "request_refused"]
    wanted = [(400, "logit_bias"), (404, "model"), (404, None)] if log_calls else []
    assert [(line["status"], line["field"]) for line in told] == wanted
    assert {line["http_request"] for line in told} <= {CLIENTS_ID}
    assert {line["level"] for line in told} <= {"info"}
    assert "zeppelin" not in log
