"""The page before a recorded gateway: what it shows, what it asks for, and what it does without one."""

import re
from itertools import product

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Locator, Page, expect

from common.messages import DrainWish, ScaleWish
from gateway.private.mesh_view import ServiceView
from gateway.private.wishes import WishView
from tests.ui.conftest import DESKTOP, PHONE, OpenPage
from tests.ui.recorded_gateway import ADMIN_KEY, RecordedGateway
from tests.ui.recorded_mesh import instance, large_mesh, mesh, placement, small_mesh, wished, worker

BUTTONS = ("Send", "Stop", "Clear")
SILENCE_MS = 12_000
"""After five seconds without a word the page says that it waits."""


def box(page: Page, name: str) -> Locator:
    return page.locator(f'#picture .box[data-key="{name}"]')


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
    page.get_by_label("of class").select_option("interactive")
    expect(goodput).to_contain_text("77 % of 31 as promised")
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


def test_an_instance_that_a_policy_has_lent_out_counts_where_it_is_at_home(
    recorded: RecordedGateway, open_page: OpenPage
) -> None:
    """As the launcher counts: one more of them is asked for."""
    page = open_page(recorded.url)
    expect(page.locator("#scale .decode output")).to_have_text("3")
    expect(page.locator("#scale .mixed output")).to_have_text("0")


def test_scaling_asks_for_the_admin_key_and_again_when_it_is_wrong(
    recorded: RecordedGateway, open_page: OpenPage
) -> None:
    page = open_page(recorded.url)
    page.get_by_role("button", name="One decode more").click()
    dialog = page.locator("#key-dialog")
    dialog.get_by_label("Key").fill("wrong")
    dialog.get_by_role("button", name="Use it").click()
    expect(dialog).to_contain_text("The gateway knows another key")
    assert recorded.wishes == []
    dialog.get_by_label("Key").fill(ADMIN_KEY)
    dialog.get_by_role("button", name="Use it").click()
    expect(page.locator("#control-answer")).to_have_text("decode → 4: accepted")
    assert recorded.wishes == [("scale", {"role": "decode", "count": 4})]


def test_whether_the_admin_key_is_there_is_said(recorded: RecordedGateway, open_page: OpenPage) -> None:
    page = open_page(recorded.url)
    hint = page.locator("#control-hint")
    expect(hint).to_have_text("needs the admin key")
    enter_key(page)
    expect(hint).to_have_text("with the admin key of this tab")
    page.get_by_role("button", name="Forget admin key").click()
    expect(hint).to_have_text("needs the admin key")


def test_who_presses_twice_asks_for_two_more_and_a_refusal_takes_its_own_back(
    recorded: RecordedGateway, open_page: OpenPage
) -> None:
    page = open_page(recorded.url)
    enter_key(page)
    more = page.get_by_role("button", name="One decode more")
    row = page.locator("#scale .decode")
    more.dblclick()
    expect(row.locator(".hint")).to_contain_text("5 asked for")
    expect(page.locator("#control-answer")).to_have_text("decode → 5: accepted")
    assert [body["count"] for _, body in recorded.wishes] == [4, 5]
    recorded.refusal = "there is no room for another"
    more.click()
    expect(page.locator("#control-answer")).to_have_text("decode → 6: there is no room for another")
    recorded.refusal = None
    # Somebody else's wish, or one of before a reload, counts as well.
    open_ = wished(ScaleWish("decode", 7), "under_way", 3.0)
    recorded.show(mesh=mesh([instance("decode-0", "decode")], {}, [], None, wished=(open_,)))
    page.reload()
    expect(row.locator(".hint")).to_have_text("7 asked for")
    more.click()
    expect(page.locator("#control-answer")).to_have_text("decode → 8: accepted")
    assert recorded.wishes[-1] == ("scale", {"role": "decode", "count": 8})


def test_the_last_one_that_requests_need_is_not_offered_to_be_ended(
    recorded: RecordedGateway, open_page: OpenPage
) -> None:
    """It would be refused. Who prefills counts, wherever they are at home."""
    services = list(recorded.shown.mesh.services)
    prefill, decode = instance("prefill-0", "prefill"), instance("decode-0", "decode")
    lent, mixed = instance("decode-1", "prefill", home="decode"), instance("mixed-0", "mixed")
    roles = ("gateway", "scheduler", "attention", "prefill", "decode", "mixed")
    page = open_page(recorded.url)
    for instances, stay in (
        ([prefill, decode], {"gateway", "prefill", "decode", "mixed"}),
        ([prefill, decode, lent], {"gateway", "mixed"}),
        ([prefill, decode, mixed], {"gateway"}),
        ([mixed], {"gateway", "prefill", "decode", "mixed"}),
    ):
        recorded.show(mesh=mesh(instances, {}, services, None))
        expect(page.locator("#picture .box")).to_have_count(len(instances) + len(services))
        for role in roles:
            fewer = page.get_by_role("button", name=f"One {role} fewer")
            expect(fewer).to_be_enabled(enabled=role not in stay)


def test_what_comes_of_a_wish_is_said_long_after_it_was_accepted(
    recorded: RecordedGateway, open_page: OpenPage
) -> None:
    page = open_page(recorded.url)
    enter_key(page)
    hint = page.locator("#scale .decode .hint")
    said = page.locator("#control-answer")
    page.get_by_role("button", name="One decode more").click()
    expect(hint).to_contain_text("4 asked for")
    expect(said).to_have_text("decode → 4: accepted")
    view = recorded.shown.mesh
    draining = wished(DrainWish("attention-1"), "under_way", 75.0)

    def show(scaling: WishView) -> None:
        instances, services = list(view.instances), list(view.services)
        recorded.show(mesh=mesh(instances, {}, services, None, wished=(scaling, draining)))

    lines = page.locator("#wished li")
    show(wished(ScaleWish("decode", 4), "under_way", 2.0))
    expect(lines).to_have_text(["decode → 4: under way for 2 s", "draining attention-1: under way for 75 s"])
    expect(hint).to_have_text("4 asked for")
    expect(said).to_be_empty()
    show(wished(ScaleWish("decode", 4), "failed", 9.0, "decode-2 ended with 1 before it was ready"))
    expect(lines.first).to_have_text("decode → 4: failed 9 s ago: decode-2 ended with 1 before it was ready")
    expect(lines.first).to_have_attribute("data-kind", "bad")
    expect(hint).to_be_hidden()


def test_what_ends_with_a_gateway_is_said_before_one_ends(
    recorded: RecordedGateway, open_page: OpenPage
) -> None:
    services = [ServiceView(f"gateway-{number}", "gateway", "node-1", 4101 + number) for number in range(2)]
    recorded.show(mesh=mesh(list(recorded.shown.mesh.instances), {}, services, None))
    page = open_page(recorded.url)
    enter_key(page)
    page.get_by_role("button", name="One gateway fewer").click()
    sure = page.locator("#sure-dialog")
    expect(sure).to_contain_text("Answers that are not finished when its time to drain is over are cut off")
    sure.get_by_role("button", name="Cancel").click()
    page.get_by_role("button", name="One decode fewer").click()
    expect(sure).to_contain_text("What runs there is finished or moved first")
    sure.get_by_role("button", name="End one").click()
    expect(page.locator("#control-answer")).to_have_text("decode → 2: accepted")
    assert recorded.wishes == [("scale", {"role": "decode", "count": 2})]


def test_a_service_is_drained_from_its_box_and_has_no_role_to_flip(
    recorded: RecordedGateway, open_page: OpenPage
) -> None:
    page = open_page(recorded.url)
    enter_key(page)
    sure = page.locator("#sure-dialog")
    box(page, "gateway-0").click()
    expect(page.get_by_role("button", name="Flip")).to_have_count(0)
    page.locator("#instance").get_by_role("button", name="Drain").click()
    expect(sure).to_contain_text("are cut off. It does not come back by itself. It serves this page")
    sure.get_by_role("button", name="Cancel").click()
    box(page, "attention-1").click()
    page.locator("#instance").get_by_role("button", name="Drain").click()
    expect(sure).to_contain_text("is finished or moved first. It does not come back by itself.")
    expect(sure).not_to_contain_text("It serves this page")
    sure.get_by_role("button", name="Drain").click()
    expect(page.locator("#control-answer")).to_have_text("draining attention-1: accepted")
    assert recorded.wishes == [("drain", {"instance": "attention-1"})]


def test_an_instance_is_flipped_and_drained_from_its_box(
    recorded: RecordedGateway, open_page: OpenPage
) -> None:
    page = open_page(recorded.url)
    enter_key(page)
    box(page, "decode-0").focus()
    page.keyboard.press("Enter")
    panel = page.locator("#instance")
    expect(panel).to_contain_text("14 sequences")
    panel.get_by_label("to").select_option("prefill")
    panel.get_by_role("button", name="Flip").click()
    expect(page.locator("#control-answer")).to_have_text("decode-0 → prefill: accepted")
    panel.get_by_role("button", name="Drain").click()
    page.locator("#sure-dialog").get_by_role("button", name="Cancel").click()
    panel.get_by_role("button", name="Drain").click()
    page.locator("#sure-dialog").get_by_role("button", name="Drain").click()
    expect(page.locator("#control-answer")).to_have_text("draining decode-0: accepted")
    flipped, drained = recorded.wishes
    assert flipped == ("flip", {"instance": "decode-0", "role": "prefill"})
    assert drained == ("drain", {"instance": "decode-0"})


def test_buttons_are_there_for_what_the_gateway_takes(recorded: RecordedGateway, open_page: OpenPage) -> None:
    view = recorded.shown.mesh
    page = open_page(recorded.url)
    box(page, "decode-0").click()
    more, flip, drain = (
        page.get_by_role("button", name=name, exact=True) for name in ("One decode more", "Flip", "Drain")
    )
    for wishes in (("flip",), ("flip", "scale", "drain"), ()):
        recorded.show(mesh=mesh(list(view.instances), {}, list(view.services), None, wishes))
        for button, name in ((more, "scale"), (flip, "flip"), (drain, "drain")):
            expect(button).to_be_visible(visible=name in wishes)
    expect(page.locator("#control")).to_contain_text("no admin key")
    expect(page.locator("#key-button")).to_be_hidden()


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


def enter_key(page: Page) -> None:
    page.locator("#key-button").click()
    page.get_by_label("Key", exact=True).fill(ADMIN_KEY)
    page.get_by_role("button", name="Use it").click()


def middle(locator: Locator) -> float:
    place = locator.bounding_box()
    assert place is not None
    return place["y"] + place["height"] / 2


def brightness(page: Page) -> float:
    colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
    red, green, blue = map(float, re.findall(r"[\d.]+", colour)[:3])
    return (red + green + blue) / 3
