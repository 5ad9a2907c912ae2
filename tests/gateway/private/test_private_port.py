"""The private port of a gateway: what it shows, and to whom."""

import asyncio
import json
import re
from typing import Any

import pytest

from common.config import GatewayConfig
from common.errors import ConfigError, InstanceLost, InvalidRequest
from common.listening import bind, port_of
from common.messages import Acknowledged, DrainWish, ScaleWish, WishNews
from common.service_classes import PROBE_HEADER
from common.store import Store
from gateway.private.server import listen
from tests.gateway.clients import complete, in_background, with_peer
from tests.gateway.private.conftest import ADMIN, API_KEY, USER, get, private_url_of
from tests.gateway.processes import Answer, GatewayProcess, send
from tests.gateway.scripted import DECODE, PREFILL, ScriptedPeer, scripted_peer
from tests.instance_records import make_record

SECRET = [40, 41, 42, 43]
"""A prompt, as token ids."""


async def running_in(url: str, phase: str) -> Any:
    """The only running request, once it is there."""
    async with asyncio.timeout(10):
        while True:
            [shown] = (await asyncio.to_thread(get, f"{url}/api/requests"))["running"]
            if shown["phase"] == phase:
                return shown


def test_a_running_request_is_shown_with_its_phase_and_then_as_ended(gateway: GatewayProcess) -> None:
    url = private_url_of(gateway)

    async def requests() -> Any:
        return await asyncio.to_thread(get, f"{url}/api/requests")

    async def script(peer: ScriptedPeer) -> None:
        peer.gate.clear()
        answer = in_background(complete(gateway, prompt=SECRET))
        request = await peer.next_request()
        [queued] = (await requests())["running"]
        assert (queued["id"], queued["phase"], queued["prompt_tokens"]) == (request.request_id, "queue", 4)
        peer.gate.set()
        assert (await running_in(url, "prefill"))["prefill_instance"] == PREFILL
        peer.work(request, "prefill")
        peer.tokens(request, [11])
        assert (await running_in(url, "transfer"))["output_tokens"] == 1
        peer.tokens(request, [12, 13], start=1)
        decoding = await running_in(url, "decode")
        assert (decoding["prefill_instance"], decoding["decode_instance"]) == (PREFILL, DECODE)
        peer.tokens(request, [14], start=3, finish="length")
        await answer
        ended = (await requests())["ended"][0]
        assert (ended["id"], ended["phase"], ended["output_tokens"]) == (request.request_id, "finished", 4)
        assert ended["finish_reason"] == "length"

    with_peer(gateway, script)


def test_a_probe_is_none_of_the_requests(gateway: GatewayProcess) -> None:
    """A new mesh's first request was one that nobody had sent: the launcher's."""
    url = private_url_of(gateway)

    async def script(peer: ScriptedPeer) -> None:
        before = await asyncio.to_thread(get, f"{url}/api/requests")
        answer = in_background(complete(gateway, extra_headers={PROBE_HEADER: "1"}))
        request = await peer.next_request()
        assert await asyncio.to_thread(get, f"{url}/api/requests") == before
        peer.tokens(request, [11], finish="length")
        await answer
        assert await asyncio.to_thread(get, f"{url}/api/requests") == before
        ended = await peer.next_end()
        assert (ended.request_id, ended.output_tokens) == (request.request_id, None)

    with_peer(gateway, script)


def test_a_token_that_overtakes_the_word_of_the_placement_shows_that_the_prompt_is_computed(
    gateway: GatewayProcess,
) -> None:
    url = private_url_of(gateway)

    async def script(peer: ScriptedPeer) -> None:
        peer.gate.clear()
        answer = in_background(complete(gateway))
        request = await peer.next_request()
        peer.work(request, "prefill")
        peer.tokens(request, [11])
        assert (await running_in(url, "transfer"))["prefill_instance"] is None
        peer.gate.set()
        peer.tokens(request, [12], start=1, finish="length")
        await answer

    with_peer(gateway, script)


def test_a_timeline_tells_of_the_recovery_of_a_sequence_that_broke(gateway: GatewayProcess) -> None:
    url = private_url_of(gateway)

    async def script(peer: ScriptedPeer) -> None:
        answer = in_background(complete(gateway))
        request = await peer.next_request()
        peer.tokens(request, [11, 12])
        peer.fail(request, InstanceLost("gone"), can_continue=True)
        again = await peer.next_request()
        peer.tokens(again, [13], finish="length")
        await answer
        name = f"cmpl-{request.request_id}"
        timeline = await asyncio.to_thread(get, f"{url}/api/requests/{name}")
        assert (timeline["request"]["attempt"], timeline["request"]["phase"]) == (1, "finished")
        spans = {span["kind"]: span for span in timeline["spans"]}
        assert spans["recovery"]["cause"] == "instance_lost"
        assert spans["recovery"]["begin_s"] <= spans["recovery"]["end_s"]
        assert spans["decode"]["instance"] == DECODE
        assert all(span["end_s"] is not None for span in timeline["spans"])

    with_peer(gateway, script)


def test_a_request_that_nobody_remembers_is_not_found(gateway: GatewayProcess) -> None:
    assert send(f"{private_url_of(gateway)}/api/requests/chatcmpl-none", None).status == 404


@pytest.mark.parametrize("newest", ["-1", "0", "some", "9" * 30])
def test_a_query_that_cannot_be_meant_is_refused_by_name(newest: str, gateway: GatewayProcess) -> None:
    refused = send(f"{private_url_of(gateway)}/api/decisions?newest={newest}", None)
    assert (refused.status, refused.error["param"]) == (400, "newest")
    assert refused.error["message"] == f"newest = {newest!r}: must be a whole number, 1..1000"


def test_latencies_are_of_the_requests_that_ended(gateway: GatewayProcess) -> None:
    url = f"{private_url_of(gateway)}/api/latency"
    before = get(url)["all"]["requests"]

    async def script(peer: ScriptedPeer) -> None:
        answer = in_background(complete(gateway))
        request = await peer.next_request()
        peer.tokens(request, [11, 12], finish="length")
        await answer

    with_peer(gateway, script)
    after = get(url)
    assert after["all"]["requests"] == before + 1
    assert after["all"]["ttft_s"]["p50_s"] > 0
    assert [each["service_class"] for each in after["classes"]] == ["default", "interactive", "batch"]


def test_the_mesh_is_shown_as_the_store_has_it(gateway: GatewayProcess) -> None:
    mesh = get(f"{private_url_of(gateway)}/api/mesh")
    assert (mesh["is_bus_connected"], mesh["is_store_answering"]) == (True, True)
    assert (mesh["instances"], mesh["leader"], mesh["plan"]) == ([], None, None)
    assert [each["id"] for each in mesh["services"]] == [mesh["gateway"]]


def test_the_mesh_says_what_who_has_the_admin_key_may_wish(
    gateway: GatewayProcess, locked_gateway: GatewayProcess
) -> None:
    assert get(f"{private_url_of(gateway)}/api/mesh")["wishes"] == []
    assert get(f"{private_url_of(locked_gateway)}/api/mesh")["wishes"] == ["flip", "scale", "drain"]


def test_the_page_is_served_and_loads_nothing_from_elsewhere(gateway: GatewayProcess) -> None:
    for path in ("/", "/ui", "/ui/"):
        page = send(f"{private_url_of(gateway)}{path}", None)
        assert (page.status, page.headers["content-type"]) == (200, "text/html; charset=utf-8"), path
        assert "default-src 'self'" in page.headers["content-security-policy"]


def test_metrics_are_those_of_the_public_port_and_need_no_key(locked_gateway: GatewayProcess) -> None:
    answers = [
        send(url, None, headers)
        for url, headers in (
            (f"{private_url_of(locked_gateway)}/metrics", {}),
            (f"{locked_gateway.url}/metrics", USER),
        )
    ]
    names = [set(re.findall(rb"^# TYPE (\S+)", each.body, re.MULTILINE)) for each in answers]
    assert names[0] == names[1] > {b"lamella_open_requests"}


def test_an_address_of_another_machine_is_refused_by_the_key_that_names_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = GatewayConfig(private_host="192.0.2.1", private_port=8001)
    with pytest.raises(
        ConfigError, match=r"gateway\.private_host = '192\.0\.2\.1': must be an address of this"
    ):
        listen(config)
    assert not caplog.records, "its port is not taken"


def test_where_its_port_is_taken_it_listens_on_a_free_one() -> None:
    with bind("127.0.0.1", 0) as other:
        taken = port_of(other)
        with listen(GatewayConfig(private_port=taken)) as listener:
            assert port_of(listener) not in (0, taken)


def test_nothing_private_is_on_the_public_port(gateway: GatewayProcess) -> None:
    for path in ("/api/mesh", "/api/requests", "/api/events", "/ui/", "/ui/index.html"):
        assert send(f"{gateway.url}{path}", None).status == 404, path


def test_a_site_whose_name_leads_here_reads_nothing(gateway: GatewayProcess) -> None:
    url = f"{private_url_of(gateway)}/api/requests"
    assert send(url, None, {"host": "evil.example:8001"}).status == 403
    for host in ("localhost:8001", "127.0.0.1", "[::1]:8001", "gateway-0:8001"):
        assert send(url, None, {"host": host}).status == 200, host


def test_changes_need_the_admin_key_and_are_impossible_without_one(
    gateway: GatewayProcess, locked_gateway: GatewayProcess
) -> None:
    wish: dict[str, object] = {"instance": "decode-0", "role": "prefill"}
    assert send(f"{private_url_of(gateway)}/api/flip", wish, ADMIN).status == 403
    url = f"{private_url_of(locked_gateway)}/api/flip"
    for headers in ({}, USER, {"authorization": "Bearer wrong"}, {"authorization": API_KEY}):
        refused = send(url, wish, headers)
        assert (refused.status, refused.error["code"]) == (401, "invalid_api_key")
    refused = send(url, wish, ADMIN)
    assert (refused.status, refused.error["code"]) == (409, "refused")
    assert "no instance decode-0" in str(refused.error["message"])
    assert send(url, {"instance": "decode-0", "role": "cook"}, ADMIN).status == 400


def test_the_last_of_a_phase_is_flipped_by_the_word_that_its_refusal_says(
    locked_gateway: GatewayProcess,
) -> None:
    url = f"{private_url_of(locked_gateway)}/api/flip"
    mesh = locked_gateway.config.mesh

    async def wish() -> Answer:
        store = Store(mesh.redis_url, mesh.namespace)
        await store.join(make_record("decode-0", "decode"), 10.0)
        try:
            return await asyncio.to_thread(send, url, {"instance": "decode-0", "role": "prefill"}, ADMIN)
        finally:
            await store.leave()
            await store.close()

    refused = asyncio.run(wish())
    assert refused.status == 409
    assert str(refused.error["message"]).endswith('no request is served; "force": true flips it')


def test_a_wish_that_is_too_long_is_not_refused_in_the_name_of_a_setting(
    locked_gateway: GatewayProcess,
) -> None:
    for name in ("flip", "scale", "drain"):
        refused = send(f"{private_url_of(locked_gateway)}/api/{name}", {"instance": "x" * 5000}, ADMIN)
        assert refused.status == 413
        assert "gateway." not in str(refused.error["message"])
        assert "over the 4096 bytes that are read here" in str(refused.error["message"])


def test_wishes_go_to_whoever_starts_processes_and_its_refusal_comes_back(
    locked_gateway: GatewayProcess,
) -> None:
    url = f"{private_url_of(locked_gateway)}/api"
    taken: list[ScaleWish | DrainWish] = []

    async def take(wish: ScaleWish | DrainWish) -> Acknowledged:
        taken.append(wish)
        if isinstance(wish, DrainWish):
            raise InvalidRequest("the last one stays")
        return Acknowledged()

    async def wish() -> None:
        async with scripted_peer(locked_gateway) as peer:
            await peer.bus.serve(peer.subjects.admin_scale(), ScaleWish, take)
            await peer.bus.serve(peer.subjects.admin_drain(), DrainWish, take)
            scaled = await asyncio.to_thread(send, f"{url}/scale", {"role": "decode", "count": 3}, ADMIN)
            drained = await asyncio.to_thread(send, f"{url}/drain", {"instance": "decode-0"}, ADMIN)
        assert taken == [ScaleWish("decode", 3), DrainWish("decode-0")]
        assert (scaled.status, drained.status) == (202, 409)
        assert drained.error["message"] == "the last one stays"

    assert send(f"{url}/scale", {"role": "decode", "count": 3}).status == 401
    for count in (-1, 2**64):
        assert send(f"{url}/scale", {"role": "decode", "count": count}, ADMIN).status == 400
    nobody = send(f"{url}/drain", {"instance": "decode-0"}, ADMIN)
    assert (nobody.status, "nobody starts" in str(nobody.error["message"])) == (503, True)
    asyncio.run(wish())


def test_what_comes_of_a_wish_is_kept_for_whoever_looks_later(gateway: GatewayProcess) -> None:
    """As it is told by whoever took it up; here nobody looks meanwhile."""
    url = private_url_of(gateway)
    grown, drained = ScaleWish("decode", 3), DrainWish("decode-0")

    async def tell() -> None:
        async with scripted_peer(gateway) as peer:
            for news in (
                WishNews("a1", grown, "under_way"),
                WishNews("b2", drained, "under_way"),
                WishNews("a1", grown, "failed", "no memory is left"),
            ):
                peer.bus.publish(peer.subjects.admin_news(), news)
            await peer.bus.flush()

    async def shown() -> Any:
        async with asyncio.timeout(10):
            while len(found := (await asyncio.to_thread(get, f"{url}/api/mesh"))["wished"]) < 2:
                pass
        return found

    asyncio.run(tell())
    failed, open_ = asyncio.run(shown())
    assert (failed["wish"], failed["state"], failed["reason"]) == (
        {"type": "scale-wish", "role": "decode", "count": 3},
        "failed",
        "no memory is left",
    )
    assert (open_["wish"]["service_id"], open_["state"]) == ("decode-0", "under_way")


def test_with_keys_everything_public_but_health_needs_one(locked_gateway: GatewayProcess) -> None:
    url = locked_gateway.url
    for path in ("/v1/models", "/metrics", "/version", "/service-levels", "/nothing"):
        refused = send(f"{url}{path}", None)
        assert (refused.status, refused.error["code"]) == (401, "invalid_api_key"), path
        assert refused.headers["www-authenticate"] == "Bearer"
    for path in ("/health", "/health/live", "/health/ready"):
        assert send(f"{url}{path}", None).status == 200, path
    assert send(f"{url}/v1/models", None, USER).status == 200
    assert send(f"{url}/nothing", None, USER).status == 404
    assert send(f"{url}/v1/models", None, {"authorization": "Bearer wrong"}).status == 401
    assert send(f"{url}/v1/models", None, ADMIN).status == 401


def test_the_model_is_asked_on_the_private_port_with_either_key(
    gateway: GatewayProcess, locked_gateway: GatewayProcess
) -> None:
    assert get(f"{private_url_of(gateway)}/v1/models")["object"] == "list"
    url = f"{private_url_of(locked_gateway)}/v1/models"
    assert [send(url, None, headers).status for headers in ({}, USER, ADMIN)] == [401, 200, 200]


def test_nothing_that_is_shown_has_a_prompt_or_an_answer(gateway: GatewayProcess) -> None:
    url = private_url_of(gateway)
    words = "heliotrope"

    async def script(peer: ScriptedPeer) -> None:
        answer = in_background(complete(gateway, prompt=words))
        request = await peer.next_request()
        peer.tokens(request, [1000, 1001])
        shown = await asyncio.to_thread(_all_shown, url, request.request_id)
        peer.tokens(request, [1002], start=2, finish="length")
        text = await answer
        shown += await asyncio.to_thread(_all_shown, url, request.request_id)
        assert text.strip()
        for secret in (words, text.strip(), json.dumps(list(request.prompt_ids)).strip("[]")):
            assert secret not in shown

    with_peer(gateway, script)


def _all_shown(url: str, request_id: str) -> str:
    paths = ("mesh", "latency", "requests", f"requests/{request_id}", "decisions")
    return "".join(send(f"{url}/api/{path}", None).body.decode() for path in paths)
