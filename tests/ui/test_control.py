"""The page's control panel before a recorded gateway: what it offers, asks for, and says of wishes."""

from playwright.sync_api import expect

from common.messages import DrainWish, ScaleWish
from gateway.private.mesh_view import ServiceView
from gateway.private.wishes import WishView
from tests.ui.conftest import OpenPage, box, enter_key
from tests.ui.recorded_gateway import ADMIN_KEY, RecordedGateway
from tests.ui.recorded_mesh import instance, mesh, wished


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
