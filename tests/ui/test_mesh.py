"""The page before a mesh as `lamella up` starts it, of emulated instances: it shows what really happens."""

import json
import os
import re
import signal
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from common.listening import bind, port_of
from tests.e2e.meshes import Mesh, running_mesh
from tests.ui.conftest import PHONE, OpenPage

CONFIG = """
[gateway]
private_port = PORT
[instance]
engine = "emulated"
block_size = 16
chunk_tokens = 64
[emulation]
decode_base_s = 0.04
prefill_base_s = 0.02
total_blocks = 256
"""
RESTART_MS = 60_000
"""A process that was killed is started again, and its lease of before has to end."""


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mesh]:
    directory = tmp_path_factory.mktemp("page")
    # One that stays when a gateway begins anew, as 8001 does.
    with bind("127.0.0.1", 0) as listener:
        config = CONFIG.replace("PORT", str(port_of(listener)))
    with running_mesh(directory / "mesh", "--decode", "2", config=config) as mesh:
        yield mesh


@pytest.fixture
def page(mesh: Mesh, open_page: OpenPage) -> Page:
    return open_page(str(mesh.status()["private_url"]))


@contextmanager
def running_request(mesh: Mesh, output_tokens: int) -> Iterator[None]:
    """A long prompt's answer; whatever became of it is known once this ends."""
    body = {
        "model": "default",
        "prompt": list(range(100, 300)),
        "max_tokens": output_tokens,
        "ignore_eos": True,
    }
    answers: list[int] = []

    def ask() -> None:
        request = urllib.request.Request(
            f"{mesh.url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as response:
            answers.append(json.load(response)["usage"]["completion_tokens"])

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        thread.join()
    assert answers == [output_tokens]


def give_key(mesh: Mesh, page: Page) -> None:
    page.locator("#key-button").click()
    page.get_by_label("Key", exact=True).fill(Path(str(mesh.status()["admin_key_file"])).read_text().strip())
    page.get_by_role("button", name="Use it").click()


def box_of(name: str) -> str:
    return f'#picture .box[data-key="{name}"]'


def test_who_runs_is_drawn_and_no_request_that_nobody_has_sent(page: Page) -> None:
    for name in ("scheduler-0", "gateway-0", "prefill-0", "decode-0", "decode-1"):
        expect(page.locator(box_of(name))).to_be_visible()
    expect(page.locator(box_of("scheduler-0"))).to_contain_text("leads")
    # Not even the one by which the launcher tried whether the mesh serves.
    expect(page.locator("#requests-none")).to_be_visible()


def test_a_running_request_is_shown_with_where_it_decodes_and_its_timeline(mesh: Mesh, page: Page) -> None:
    expect(page.locator("#connection")).to_have_text("live")
    with running_request(mesh, 300):
        row = page.locator("#request-rows tr:not(.over)")
        expect(row.locator(".phase")).to_have_text("decode")
        expect(row).to_contain_text(re.compile(r"prefill-0 → decode-[01]"))
        expect(page.locator("#picture .decode .line", has_text="1 run")).to_be_visible()
        row.get_by_role("button").click()
        picture = page.locator("#timeline svg")
        expect(picture.locator("rect.prefill")).to_have_count(4)
        expect(picture.locator("rect.decode")).to_have_count(1)
    expect(page.locator("#timeline")).to_contain_text("finished")
    expect(page.locator('.tile[data-key="TTFT"]')).not_to_contain_text("none has ended")
    expect(page.locator("#decision-list details").first).to_contain_text("prefill-0 → decode-")


def test_the_chat_box_talks_to_the_model(page: Page) -> None:
    page.get_by_label("Most tokens").fill("12")
    page.get_by_label("Message").fill("What is a lamella?")
    page.get_by_role("button", name="Send").click()
    expect(page.locator("#chat-speed")).to_contain_text("tokens/s")
    expect(page.get_by_role("button", name="Stop")).to_be_hidden()
    expect(page.locator("#chat-turns .turn")).to_have_count(2)
    expect(page.locator("#chat-turns .turn.bad")).to_have_count(0)


def test_an_instance_is_flipped_by_a_button(mesh: Mesh, page: Page) -> None:
    key = Path(str(mesh.status()["admin_key_file"])).read_text().strip()
    for role in ("prefill", "decode"):
        page.locator(box_of("decode-1")).click()
        page.locator("#instance").get_by_label("to").select_option(role)
        page.locator("#instance").get_by_role("button", name="Flip").click()
        if role == "prefill":
            page.get_by_label("Key", exact=True).fill(key)
            page.get_by_role("button", name="Use it").click()
        expect(page.locator("#control-answer")).to_have_attribute("data-kind", "good")
        expect(page.locator(f"{box_of('decode-1')}.{role}")).to_be_visible()
        page.locator(box_of("decode-1")).click()


def test_another_instance_is_started_and_drained_by_buttons(mesh: Mesh, page: Page) -> None:
    give_key(mesh, page)
    page.get_by_role("button", name="One decode more").click()
    newest = page.locator("#wished li").first
    # Where a machine is fast it is done when this looks: how it looks meanwhile is tested in test_control.py.
    expect(newest).to_contain_text(re.compile("decode → 3: (under way|done)"))
    expect(page.locator("#control-answer")).to_be_empty()
    added = page.locator(box_of("decode-2"))
    expect(added).to_be_visible(timeout=RESTART_MS)
    expect(page.locator("#scale .decode output")).to_have_text("3")
    expect(newest).to_contain_text("decode → 3: done", timeout=RESTART_MS)
    added.click()
    page.locator("#instance").get_by_role("button", name="Drain").click()
    page.locator("#sure-dialog").get_by_role("button", name="Drain").click()
    expect(newest).to_contain_text("draining decode-2: ")
    expect(added).to_have_count(0, timeout=RESTART_MS)
    expect(page.locator("#scale .decode output")).to_have_text("2")


def test_what_cannot_be_is_said(mesh: Mesh, page: Page) -> None:
    give_key(mesh, page)
    page.locator(box_of("prefill-0")).click()
    page.locator("#instance").get_by_role("button", name="Flip").click()
    expect(page.locator("#control-answer")).to_have_attribute("data-kind", "bad")
    expect(page.locator("#control-answer")).to_contain_text("prefill")


def test_a_decode_instance_that_hangs_and_dies_is_seen_to_go_and_to_come_back(mesh: Mesh, page: Page) -> None:
    """It hangs first, for its lease to end: one that just dies may be there again before that."""
    serving = page.locator(f"{box_of('decode-0')}.decode:not(.unready)")
    expect(serving).to_be_visible()
    with running_request(mesh, 100):
        expect(page.locator("#request-rows tr:not(.over) .phase")).to_have_text("decode")
        hung = mesh.pid_of("decode-0")
        os.kill(hung, signal.SIGSTOP)
        expect(serving).to_have_count(0, timeout=RESTART_MS)
        os.kill(hung, signal.SIGKILL)
        expect(serving).to_be_visible(timeout=RESTART_MS)
    expect(page.locator("#connection")).to_have_text("live")


def test_a_gateway_that_hangs_and_dies_is_waited_for(mesh: Mesh, page: Page) -> None:
    """It hangs first: the next one may be there before anybody has looked."""
    expect(page.locator("#connection")).to_have_text("live")
    hung = mesh.pid_of("gateway")
    os.kill(hung, signal.SIGSTOP)
    expect(page.locator("#connection")).to_have_text("reconnecting", timeout=RESTART_MS)
    expect(page.locator("#stale")).to_be_visible()
    os.kill(hung, signal.SIGKILL)
    expect(page.locator("#connection")).to_have_text("live", timeout=RESTART_MS)
    expect(page.locator("#stale")).to_be_hidden()
    expect(page.locator(box_of("prefill-0"))).to_be_visible()


def test_a_phone_shows_the_same(mesh: Mesh, open_page: OpenPage) -> None:
    page = open_page(str(mesh.status()["private_url"]), PHONE)
    expect(page.locator(box_of("decode-1"))).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") == PHONE[0]
