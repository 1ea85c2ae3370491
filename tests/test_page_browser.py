"""The report in a real browser: headless Chromium opens it and measures what it shows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from headless import CHROMIUM, Browser
from results_builder import FakeCase, FakeComparison, standard_cases, write_run
from whole_builder import write_whole

from moe_ep_bench.analysis.page import write_report

pytestmark = pytest.mark.browser

WIDTHS = (1280, 400)
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
LONG = "a_policy_with_a_long_name_" * 4


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Addresses of a page of one comparison, with all that may go wrong in it, and of one of a sweep."""
    folder = tmp_path_factory.mktemp("pages")
    cases = [
        *standard_cases(),
        FakeCase("oea", label=f"oea {HOSTILE}", speedup=2.5),
        FakeCase("lynx", label=LONG, speedup=12.0, dropped=0.3),
        FakeCase("laser", status="oom", reason="rank 3: " + "tried to allocate 12.3 GiB " * 5),
    ]
    one = FakeComparison(cases=cases, num_ranks=8, num_iterations=2, conditions={"rank": {"hostname": HOSTILE}})
    write_run(folder / "one", [one])
    swept = [
        FakeComparison(
            f"c{peak}",
            {"point": {"workload.peak_load": peak}, "title": f"Tiny-MoE, peak load {peak}"},
            standard_cases(),
            num_iterations=2,
        )
        for peak in (1.0, 2.0, 4.0)
    ]
    write_run(folder / "sweep", swept)
    factors = [
        FakeCase(policy, params={"capacity_factor": f}) for policy in ("token_drop", "oea") for f in (1, 2, 3, 4)
    ]
    many = [*(case for case in standard_cases() if case.policy != "token_drop"), *factors]
    write_whole(folder / "whole", many, of_layers=61, moe_layers=range(1, 27), num_batches=2)
    return {name: write_report([folder / name])[0].as_uri() for name in ("one", "sweep", "whole")}


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    assert CHROMIUM is not None, "chromium is not installed: apt-get install chromium"
    with Browser(tmp_path_factory.mktemp("browser") / "profile") as opened:
        yield opened


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["one", "sweep", "whole"])
def test_a_page_loads_whole_quiet_and_legible(browser: Browser, pages: dict[str, str], name: str, width: int) -> None:
    browser.open(pages[name], width)

    # Nothing is fetched but the file itself, nothing fails, and nothing is said on the console.
    requested = [event["request"]["url"] for event in browser.of_kind("Network.requestWillBeSent")]
    assert [address for address in requested if not address.startswith("data:")] == [pages[name]]
    complaints = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded", "Network.loadingFailed")
    assert browser.of_kind(*complaints, "Page.javascriptDialogOpening") == []

    # Figures are there and have a size; those beside the fold too.
    figures = browser.evaluate(
        "Promise.all([...document.images].map(i => i.decode().then(() => {"
        " const box = i.getBoundingClientRect();"
        " return [i.naturalWidth, i.naturalHeight, box.width, box.height, i.alt.length]; })))"
    )
    assert len(figures) >= 4
    assert all(min(figure) > 0 for figure in figures), figures
    assert max(box for _, _, box, *_ in figures) > 0.7 * width

    # The page itself never scrolls sideways, with all that can be opened open: wide things have boxes of their own.
    browser.evaluate("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    viewport, content = browser.evaluate("[window.innerWidth, document.documentElement.scrollWidth]")
    assert viewport == width
    assert content <= width

    # No text is smaller than 12 px.
    sizes = browser.evaluate(
        "(() => { const sizes = []; const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);"
        " while (walk.nextNode()) { const e = walk.currentNode.parentElement;"
        "  if (walk.currentNode.textContent.trim() && e.getClientRects().length)"
        "   sizes.push(parseFloat(getComputedStyle(e).fontSize)); } return sizes; })()"
    )
    assert len(sizes) > 100
    assert min(sizes) >= 12


def test_in_the_dark_text_is_light_and_figures_stay_on_white(browser: Browser, pages: dict[str, str]) -> None:
    colours = "[document.body, document.querySelector('.card')].map(e => getComputedStyle(e).backgroundColor)"
    browser.open(pages["one"], 1280)
    assert browser.evaluate(colours) == ["rgb(255, 255, 255)"] * 2
    browser.open(pages["one"], 1280, dark=True)
    body, card = browser.evaluate(colours)
    assert card == "rgb(255, 255, 255)"
    assert max(map(int, body.removeprefix("rgb(").removesuffix(")").split(", "))) < 64


@pytest.mark.parametrize("width", WIDTHS)
def test_a_table_of_many_layers_and_policies_fits_the_page(browser: Browser, pages: dict[str, str], width: int) -> None:
    browser.open(pages["whole"], width)
    heads, rows, room = browser.evaluate(
        "(() => { const isOfLayers = t => t.tHead?.rows[0].cells[0].textContent === 'layer';"
        " const table = [...document.querySelectorAll('table')].find(isOfLayers);"
        " return [table.tHead.rows[0].cells.length, table.tBodies[0].rows.length,"
        "  table.parentElement.clientWidth - table.scrollWidth]; })()"
    )
    assert (heads, rows) == (5, 2 * 27)
    assert room >= 0 or width == 400, "the table of layers is wider than a page"
