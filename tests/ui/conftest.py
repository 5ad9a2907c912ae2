"""A headless Chromium of this machine's, and pages in it."""

import os
import shutil
from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright

from tests.ui.recorded_gateway import ADMIN_KEY, RecordedGateway, running_recorded_gateway
from tests.ui.recorded_mesh import small_mesh

NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
# Nothing of a browser that looks for updates or other company.
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
DESKTOP = (1280, 800)
PHONE = (390, 844)

OpenPage = Callable[..., Page]

# Five seconds are its own limit, for which a busy machine may hold up a browser.
expect.set_options(timeout=60_000)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Of one module's tests: as long as it lives, no other test of this process can run an event loop."""
    executable = os.environ.get("LAMELLA_CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
    if executable is None:
        pytest.skip("no Chromium: the page is not tested. apt-get install chromium, or set LAMELLA_CHROMIUM")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, headless=True, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: Browser) -> Iterator[OpenPage]:
    """Opens a gateway's page, in a window of that size. Whatever the page could not do fails the test."""
    opened: list[tuple[Page, list[str]]] = []

    def open_(url: str, size: tuple[int, int] = DESKTOP, theme: str = "light") -> Page:
        is_phone = size == PHONE
        context = browser.new_context(
            viewport={"width": size[0], "height": size[1]},
            color_scheme="dark" if theme == "dark" else "light",
            has_touch=is_phone,
            is_mobile=is_phone,
            device_scale_factor=2 if is_phone else 1,
        )
        page = context.new_page()
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("request", lambda request: errors.extend(_foreign(request.url, url)))
        opened.append((page, errors))
        page.goto(f"{url}/ui/")
        return page

    yield open_
    for page, errors in opened:
        page.context.close()
        assert not errors


@pytest.fixture
def recorded() -> Iterator[RecordedGateway]:
    with running_recorded_gateway(small_mesh()) as gateway:
        yield gateway


def box(page: Page, name: str) -> Locator:
    return page.locator(f'#picture .box[data-key="{name}"]')


def enter_key(page: Page) -> None:
    page.locator("#key-button").click()
    page.get_by_label("Key", exact=True).fill(ADMIN_KEY)
    page.get_by_role("button", name="Use it").click()


def _foreign(requested: str, url: str) -> list[str]:
    """The page is to work where there is no network but the gateway."""
    return [] if requested.startswith((f"{url}/", "data:")) else [f"asked for {requested}"]
