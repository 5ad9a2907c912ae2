"""The page before a recorded gateway: what it shows, what it asks for, and what it does without one."""

import re
from itertools import product

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Locator, Page, expect

from tests.ui.conftest import DESKTOP, PHONE, OpenPage, box
from tests.ui.recorded_gateway import RecordedGateway
from tests.ui.recorded_mesh import instance, large_mesh, mesh, placement, small_mesh, worker

BUTTONS = ("Send", "Stop", "Clear")
SILENCE_MS = 12_000
"""After five seconds without a word the page says that it waits."""


def test_every_member_is_drawn_in_its_pool(recorded: RecordedGateway, open_page: OpenPage) -> None:
    page = open_page(recorded.url)
    titles = page.locator("#picture .titles text")
    expect(titles).to_have_text(["Schedulers", "Gateways", "Prefill", "Mixed", "Decode", "Attention"])
    view = recorded.shown.mesh
    expect(page.locator("#picture .box")).to_have_count(len(view.instances) + len(view.services))
    expect(box(page, "decode-1")).to_have_attribute(
        "aria-label", re.compile("11 run · 2 wait.*94 % of its KV")
    )
    expect(box(page, "prefill-1")).to_have_attribute("aria-label", re.compile("draining"))
    expect(box(page, "mixed-0").locator(".note")).to_have_text("from decode")
    expect(box(page, "scheduler-0").locator(".note")).to_have_text("leads")
    expect(box(page, "attention-0")).to_have_attribute("aria-label", re.compile("holds 9, 74 % of its KV"))
    expect(box(page, "attention-1").locator(".note")).to_have_text("draining")
    box(page, "attention-1").click()
    expect(page.locator("#instance")).to_contain_text("the KV of 2 sequences")


def test_the_bar_of_an_instance_is_as_long_as_its_kv_is_full(
    recorded: RecordedGateway, open_page: OpenPage
) -> None:
    page = open_page(recorded.url)
    bar, ground = (box(page, "decode-0").locator(name) for name in (".kv", ".kv-ground"))
    expect(bar).to_be_visible()
    share = float(bar.get_attribute("width") or 0) / float(ground.get_attribute("width") or 1)
    assert abs(share - 0.62) < 0.01


def test_a_link_says_its_bytes_a_second(recorded: RecordedGateway, open_page: OpenPage) -> None:
    page = open_page(recorded.url)
    words = page.locator("#picture .link-words text")
    expect(words).to_have_count(3)
    assert set(words.all_text_contents()) == {"48.2 MB/s", "7.7 MB/s", "420 kB/s"}
    recorded.show(mesh=mesh(list(recorded.shown.mesh.instances), {}, [], None))
    expect(words).to_have_count(0)


def test_tiles_tell_the_class_that_is_chosen(recorded: RecordedGateway, open_page: OpenPage) -> None:
    page = open_page(recorded.url)
    goodput = page.locator('.tile[data-key="Goodput"]')
    expect(goodput).to_contain_text("92 % of 123 as promised")
    output = page.locator('.tile[data-key="Output"]')
    expect(output).to_contain_text("413 tokens/s now")
    page.get_by_label("of class").select_option("interactive")
    expect(goodput).to_contain_text("77 % of 31 as promised")
    expect(output).to_contain_text("96.1 tokens/s of ended")
    page.get_by_label("of class").select_option("batch")
    expect(page.locator('.tile[data-key="TTFT"]')).to_contain_text("none has ended")


def test_a_request_shows_its_phase_and_when_chosen_its_timeline(
    recorded: RecordedGateway, open_page: OpenPage
) -> None:
    page = open_page(recorded.url)
    row = page.locator('#request-rows tr[data-key="91bb07c2a4d5f6e1"]')
    expect(row).to_contain_text("recovery")
    expect(row).to_contain_text("prefill-0 → decode-1")
    row.get_by_role("button").click()
    picture = page.get_by_role("img", name=re.compile("queue 110 ms, prefill"))
    expect(picture).to_be_visible()
    for kind, bars in {"queue": 1, "prefill": 3, "transfer": 1, "decode": 2, "recovery": 1}.items():
        expect(picture.locator(f"rect.{kind}")).to_have_count(bars)
    page.get_by_text("As a table").click()
    expect(page.locator("#timeline table")).to_contain_text("instance gone, noticed after 1.00 s")


def test_the_page_asks_for_nothing_but_its_files_and_one_stream_of_events(
    recorded: RecordedGateway, open_page: OpenPage
) -> None:
    page = open_page(recorded.url)
    expect(page.locator("#connection")).to_have_text("live")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url.removeprefix(recorded.url)))
    page.reload()
    page.locator('#request-rows tr[data-key="91bb07c2a4d5f6e1"]').get_by_role("button").click()
    expect(page.locator("#timeline svg")).to_be_visible()
    expect(page.locator("#decision-list details")).to_have_count(2)
    recorded.show(decisions=recorded.shown.decisions[:1])
    expect(page.locator("#decision-list details")).to_have_count(1)
    expect(page.locator("#connection")).to_have_text("live")
    assert [each for each in asked if not each.startswith("/ui/")] == [
        "/api/events",
        "/api/events?request=91bb07c2a4d5f6e1",
    ]


def test_a_timeline_that_nobody_remembers_is_said_to_be_gone(
    recorded: RecordedGateway, open_page: OpenPage
) -> None:
    """As after a gateway's restart."""
    page = open_page(recorded.url)
    page.locator('#request-rows tr[data-key="91bb07c2a4d5f6e1"]').get_by_role("button").click()
    expect(page.locator("#timeline svg")).to_be_visible()
    recorded.show(timelines=())
    expect(page.locator("#timeline")).to_contain_text("remembers no request 91bb07c2a4d5f6e1")


def test_a_decision_names_who_was_refused_and_why(recorded: RecordedGateway, open_page: OpenPage) -> None:
    page = open_page(recorded.url)
    entry = page.locator("#decision-list details").first
    expect(entry.locator("summary")).to_contain_text("prefill-0 → decode-1")
    entry.locator("summary").click()
    expect(entry).to_contain_text("prefill: shortest queue, TTFT predicted 310 ms")
    expect(entry.locator("tr", has_text="prefill-1")).to_contain_text("it is draining")


def test_a_decision_is_over_also_when_its_client_left(recorded: RecordedGateway, open_page: OpenPage) -> None:
    names = ("1a1a1a1a1a1a1a1a", "2b2b2b2b2b2b2b2b", "3c3c3c3c3c3c3c3c")
    runs, left, ended = (
        placement(name, "prefill-0", "decode-1", is_over=name != names[0], output=output)
        for name, output in zip(names, (None, None, 128), strict=True)
    )
    recorded.show(decisions=(runs, left, ended))
    hints = open_page(recorded.url).locator("#decision-list summary .hint")
    said = ("not over yet", "left or broken off", "128 drawn")
    expect(hints).to_have_text([f"default · 812 prompt tokens · 164 predicted, {words}" for words in said])


def test_the_chat_box_streams_an_answer(recorded: RecordedGateway, open_page: OpenPage) -> None:
    page = open_page(recorded.url)
    page.get_by_label("Message").fill("What is a lamella?")
    page.keyboard.press("Enter")
    expect(page.locator("#chat-turns .turn").last).to_contain_text("A lamella is a thin plate.")
    expect(page.locator("#chat-speed")).to_contain_text("first token after")


def test_an_answer_that_was_stopped_is_no_error(recorded: RecordedGateway, open_page: OpenPage) -> None:
    recorded.is_chat_endless = True
    for size in (DESKTOP, PHONE):
        page = open_page(recorded.url, size)
        expect(page.locator("#tiles .tile")).to_have_count(5)
        send, stop, clear = (page.get_by_role("button", name=name, exact=True) for name in BUTTONS)
        page.get_by_label("Message").fill("What is a lamella?")
        send.click()
        answer = page.locator("#chat-turns .turn").last
        expect(answer).to_contain_text("A lamella is a thin plate.")
        expect(send).to_be_hidden()
        expect(stop).to_be_focused()
        # On one line with the others.
        assert abs(middle(stop) - middle(clear)) < 2
        page.keyboard.press("Enter")
        expect(answer).to_contain_text("(stopped)")
        expect(answer).not_to_have_class(re.compile("bad"))
        expect(send).to_be_focused()


def test_a_stream_that_breaks_off_is_opened_again_and_said_to_be_lost(
    recorded: RecordedGateway, open_page: OpenPage
) -> None:
    page = open_page(recorded.url)
    expect(page.locator("#connection")).to_have_text("live")
    recorded.state = "away"
    expect(page.locator("#connection")).to_have_text("reconnecting")
    expect(page.get_by_role("alert").filter(has_text="what is shown is old")).to_be_visible()
    expect(box(page, "decode-0")).to_be_visible()
    recorded.show(mesh=mesh([instance("decode-7", "decode")], {}, [], None))
    recorded.state = "well"
    expect(page.locator("#connection")).to_have_text("live", timeout=SILENCE_MS)
    expect(box(page, "decode-7")).to_be_visible()
    expect(page.locator("#stale")).to_be_hidden()


def test_a_stream_that_only_falls_silent_is_noticed(recorded: RecordedGateway, open_page: OpenPage) -> None:
    page = open_page(recorded.url)
    expect(page.locator("#connection")).to_have_text("live")
    recorded.state = "silent"
    expect(page.locator("#connection")).to_have_text("reconnecting", timeout=SILENCE_MS)
    recorded.state = "well"
    expect(page.locator("#connection")).to_have_text("live", timeout=SILENCE_MS)


def test_nothing_is_wider_than_a_desktop_or_a_phone(recorded: RecordedGateway, open_page: OpenPage) -> None:
    for shown in (small_mesh(), large_mesh()):
        recorded.shown = shown
        for size in (DESKTOP, PHONE):
            page = open_page(recorded.url, size)
            expect(page.locator("#picture .box")).to_have_count(
                len(shown.mesh.instances) + len(shown.mesh.services)
            )
            assert page.evaluate("document.documentElement.scrollWidth") == size[0]
            widest = page.evaluate("document.querySelector('#picture svg').getBoundingClientRect().right")
            assert widest <= size[0]


def test_a_phone_shows_all_of_a_request_and_of_a_number(
    recorded: RecordedGateway, open_page: OpenPage
) -> None:
    page = open_page(recorded.url, PHONE)
    expect(page.locator("#request-rows tr")).to_have_count(8)
    for part in ("#requests .scroller", ".tile .more >> nth=0", ".tile .more >> nth=3"):
        wide, shown = page.locator(part).evaluate("(part) => [part.scrollWidth, part.clientWidth]")
        assert wide <= shown, part


def test_what_a_box_on_a_phone_says_of_itself_is_brought_into_view(
    recorded: RecordedGateway, open_page: OpenPage
) -> None:
    page = open_page(recorded.url, PHONE)
    panel = page.locator("#instance")
    expect(panel).not_to_be_in_viewport()
    box(page, "prefill-0").tap()
    expect(panel.get_by_role("button", name="Drain")).to_be_in_viewport()
    page.evaluate("scrollTo({top: 0, behavior: 'instant'})")
    box(page, "prefill-0").tap()
    expect(panel).to_be_empty()
    expect(box(page, "prefill-0")).to_be_in_viewport()


def test_words_of_a_link_lie_on_no_title(recorded: RecordedGateway, open_page: OpenPage) -> None:
    """Nor does the ground that hides the line below them."""
    links = {("prefill-0", "decode-0"): 13.8e6, ("decode-0", "attention-0"): 420e3}
    pair = [instance("prefill-0", "prefill"), instance("decode-0", "decode")]
    recorded.show(mesh=mesh(pair, links, [worker("attention-0", 4107, running=1, used=0.5)], None))
    for size in (DESKTOP, PHONE):
        page = open_page(recorded.url, size)
        expect(page.locator("#picture .link-words text")).to_have_count(2)
        # At once: what stands above may still grow.
        *words, prefill, decode, attention = page.evaluate(
            "[...document.querySelectorAll('#picture .link-words text, #picture .titles text')]"
            ".sort((one, other) => other.matches('.link-words *') - one.matches('.link-words *'))"
            ".map((text) => text.getBoundingClientRect())"
            ".map(({left, right, top, bottom}) => [left, right, top, bottom])"
        )
        assert len(words) == 2
        for title, said in product((prefill, decode, attention), words):
            is_aside = title[1] <= said[0] or title[0] >= said[1]
            assert is_aside or title[3] <= said[2] or title[2] >= said[3], (title, said)


def test_boxes_of_a_mesh_of_fifty_do_not_lie_on_each_other(
    recorded: RecordedGateway, open_page: OpenPage
) -> None:
    recorded.shown = large_mesh()
    for size in (DESKTOP, PHONE):
        page = open_page(recorded.url, size)
        expect(box(page, "lamella-decode-58d4-39")).to_be_visible()
        places = page.evaluate(
            "[...document.querySelectorAll('#picture .box .ground')]"
            ".map((box) => box.getBoundingClientRect())"
            ".map(({left, right, top, bottom}) => [left, right, top, bottom])"
        )
        for index, (left, right, top, bottom) in enumerate(places):
            for other in places[:index]:
                apart = other[1] <= left or other[0] >= right or other[3] <= top or other[2] >= bottom
                assert apart, (places[index], other)


def test_light_and_dark_follow_the_system_until_one_is_chosen(
    recorded: RecordedGateway, open_page: OpenPage
) -> None:
    page = open_page(recorded.url, theme="dark")
    assert brightness(page) < 60
    page.get_by_label("Colours").select_option("light")
    assert brightness(page) > 200
    page.reload()
    assert brightness(page) > 200
    page.get_by_label("Colours").select_option("auto")
    assert brightness(page) < 60


def test_nothing_speaks_against_those_who_see_little_or_use_no_mouse(
    recorded: RecordedGateway, open_page: OpenPage
) -> None:
    for size, theme in ((DESKTOP, "light"), (DESKTOP, "dark"), (PHONE, "light"), (PHONE, "dark")):
        page = open_page(recorded.url, size, theme)
        expect(page.locator("#decision-list details")).to_have_count(2)
        box(page, "decode-1").click()
        page.locator("#request-rows button").nth(1).click()
        expect(page.locator("#timeline svg")).to_be_visible()
        found = Axe().run(page)
        assert found.violations_count == 0, found.generate_report()


def middle(locator: Locator) -> float:
    place = locator.bounding_box()
    assert place is not None
    return place["y"] + place["height"] / 2


def brightness(page: Page) -> float:
    colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
    red, green, blue = map(float, re.findall(r"[\d.]+", colour)[:3])
    return (red + green + blue) / 3
