"""The page in a real browser: no request, no error, hover and search work, nothing sticks out of a small screen."""

import os
import re
import shutil

import pytest
from tests.report.plans import many_experts, rows_to_columns

from reshard.report.html import make_page, render_page
from reshard.schedule.trace import Trace, TraceEvent

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
FLAGS += ["--disable-component-update", "--disable-sync"]


@pytest.fixture(scope="module")
def browser():
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        sync_playwright = None
    if sync_playwright is None or CHROMIUM is None:
        reason = "needs playwright and chromium: pip install playwright, apt-get install chromium"
        pytest.fail(reason) if os.environ.get("CI") else pytest.skip(reason)
    with sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The 8 x 8 example with a trace, and a plan of many ranks, as files."""
    folder = tmp_path_factory.mktemp("pages")
    events = [TraceEvent(0, "send", 2, k, k, k + 0.5, 16) for k in range(8)]
    events += [TraceEvent(2, "recv", 0, k, k, k + 0.5, 16) for k in range(8)]
    first, *others = (rows_to_columns(strategy) for strategy in ("reshard", "point-to-point", "gather-broadcast"))
    pages = {
        "small": make_page(first, others=others, trace=Trace(tuple(events), "made up")),
        "large": make_page(many_experts(layers=4)),
    }
    for name, page in pages.items():
        (folder / f"{name}.html").write_text(render_page(page), "utf-8")
    return folder


@pytest.fixture
def opened(browser, files):
    """Open a page; at the end of the test it must have asked for nothing and complained of nothing."""
    contexts, faults = [], []

    def opened(name, width=1600, **options):
        context = browser.new_context(viewport={"width": width, "height": 900}, **options)
        contexts.append(context)
        page = context.new_page()
        page.on("request", lambda r: r.url.startswith(("file:", "data:", "blob:")) or faults.append(r.url))
        page.on("console", lambda m: m.type in ("error", "warning") and faults.append(m.text))
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.goto((files / f"{name}.html").as_uri())
        return page

    yield opened
    for context in contexts:
        context.close()
    assert faults == []


@pytest.mark.parametrize("name", ["small", "large"])
@pytest.mark.parametrize("width", [360, 1600])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_fits_the_screen_in_both_schemes(opened, name, width, scheme):
    page = opened(name, width, color_scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") == width
    ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
    dark = sum(map(int, re.findall(r"\d+", ground)[:3])) < 3 * 128
    assert dark == (scheme == "dark")
    assert page.locator("#one-rank svg").count() > 0


def test_a_destination_box_that_is_pointed_at_shows_its_sources(opened):
    page = opened("small")
    assert page.locator(".source .parts .on").count() == 0
    page.locator(".destination .boxes > g").nth(1).hover()
    lit = page.locator(".source .parts .on")
    assert lit.count() == 2  # of the 8 parts, the second column of both source ranks
    column = page.locator(".destination .boxes > g rect").nth(1)
    assert {lit.nth(at).get_attribute("x") for at in range(2)} == {column.get_attribute("x")}
    now = page.locator(".flows .now").inner_text()
    assert "wanted by gen0 1" in now
    assert "16 B from trainer 0: [0:4, 2:4)" in now
    page.locator("h1").hover()
    assert page.locator(".source .parts .on").count() == 0


def test_a_destination_box_can_be_reached_by_the_keyboard(opened):
    page = opened("small")
    page.locator(".destination .boxes > g").first.focus()
    page.keyboard.press("Tab")
    assert "wanted by gen0 1" in page.locator(".flows .now").inner_text()


@pytest.mark.parametrize(
    ("words", "rows"),
    [
        ("up_proj", 1),
        ("layers.3.mlp.experts.17.up", 1),  # one of the names that the row stands for
        ("layers.4.", 0),  # there are layers 0 to 3
        ("experts.32", 0),
        ("UP weight", 1),
        ("down", 0),
    ],
)
def test_the_search_finds_a_row_by_any_name_that_it_stands_for(opened, words, rows):
    page = opened("large")
    page.locator("#search").fill(words)
    assert page.locator(".families tbody tr:visible").count() == rows
    assert page.locator("#found").inner_text() == f"{128 * rows} tensors in {rows} of 1 rows"


def test_a_cell_of_the_matrix_says_what_it_is_and_chooses_its_sender(opened):
    page = opened("small")
    page.locator("#matrix-drawing").scroll_into_view_if_needed()
    box = page.locator("#matrix-cells .ground").bounding_box()
    page.mouse.move(box["x"] + box["width"] * 5 / 8, box["y"] + box["height"] * 3 / 4)
    assert page.locator("#matrix-now").inner_text() == "trainer 1 sends 16 B to gen0 2"
    page.mouse.click(box["x"] + box["width"] * 5 / 8, box["y"] + box["height"] * 3 / 4)
    assert page.locator("#rank-choice").input_value() == "trainer 1"
    assert "Sends to 4 peers, 64 B" in page.locator("#rank-peers").inner_text()


def test_the_timeline_zooms_where_it_is_pointed_at_and_goes_back(opened):
    page = opened("small")
    drawing = page.locator("#timeline-drawing")
    drawing.scroll_into_view_if_needed()
    box = drawing.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 20)
    page.keyboard.down("Control")
    page.mouse.wheel(0, -20)
    page.keyboard.up("Control")
    ticks = page.locator("#timeline-ticks")
    page.wait_for_function("document.querySelector('#timeline-ticks span').textContent !== '0 us'")
    assert "3.75 s" in ticks.inner_text()  # half of 7.5 s stays under the pointer
    drawing.dblclick()
    page.wait_for_function("document.querySelector('#timeline-ticks span').textContent === '0 us'")


def test_a_drawn_tensor_opens_from_the_table(opened):
    page = opened("small")
    page.locator("details.figure summary").first.click()
    assert not page.locator("#tensor-0").is_visible()
    page.get_by_role("link", name="drawn").click()
    assert page.locator("#tensor-0").is_visible()


def test_without_scripts_all_but_the_additions_is_there(opened):
    page = opened("small", java_script_enabled=False)
    for part in ("#tensor-0 svg", "#matrix svg", "#ports svg", "#timeline svg", "#strategies table", "#families table"):
        assert page.locator(part).first.is_visible()
    assert not page.locator("#one-rank").is_visible()
    assert not page.locator("#search").is_visible()


@pytest.mark.parametrize("scripts", [True, False])
@pytest.mark.parametrize("name", ["small", "large"])
def test_a_small_screen_shows_all_that_the_table_says_of_a_tensor(opened, name, scripts):
    page = opened(name, 360, color_scheme="dark", java_script_enabled=scripts)
    row = page.locator(".families tbody tr").first
    for cell in row.locator("th, td").all():
        box = cell.bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= 360
    assert page.locator(".families thead").is_visible() == scripts  # its heads sort


def test_a_printed_page_is_as_wide_as_the_paper(opened):
    page = opened("large", 700)
    page.emulate_media(media="print")
    for cell in page.locator(".families tbody tr").first.locator("th, td.number").all():
        assert cell.bounding_box()["x"] + cell.bounding_box()["width"] <= 700
    has, wants = (page.locator(f"#tensor-0 .tensor.{side}").bounding_box() for side in ("source", "destination"))
    assert has["y"] == wants["y"], "both layouts side by side"


def test_print_opens_every_tensor_and_is_light(opened):
    page = opened("small", color_scheme="dark")
    page.locator("details.figure summary").first.click()
    assert not page.locator("#tensor-0").is_visible()
    page.emulate_media(media="print", color_scheme="dark")
    assert page.locator("#tensor-0").is_visible()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.evaluate("getComputedStyle(document.querySelector('h1')).color") == "rgb(28, 33, 41)"
