"""The report in a real browser: headless Chromium opens it, sorts its tables and measures what it shows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from headless import CHROMIUM, Browser
from results_builder import FakeCase, FakeComparison, standard_cases, write_run, write_whole

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


def column(browser: Browser, head: str) -> list[str]:
    """The texts of a column of the first table, from top to bottom."""
    return browser.evaluate(
        "(() => { const heads = [...document.querySelector('table').tHead.rows[0].cells];"
        f" const at = heads.findIndex(h => h.textContent.trim() === {head!r});"
        " const rows = [...document.querySelector('table').tBodies[0].rows];"
        " return rows.map(row => row.cells[at].textContent.trim()); })()"
    )


def click(browser: Browser, head: str) -> str:
    """Click a head of the first table as a reader does; what it then says of its order."""
    place = browser.evaluate(
        "(() => { const button = [...document.querySelectorAll('table thead button')]"
        f".find(b => b.textContent.trim() === {head!r}); button.scrollIntoView({{block: 'center', inline: 'center'}});"
        " const box = button.getBoundingClientRect(); return [box.x + box.width / 2, box.y + box.height / 2]; })()"
    )
    for kind in ("mousePressed", "mouseReleased"):
        browser.ask("Input.dispatchMouseEvent", type=kind, x=place[0], y=place[1], button="left", clickCount=1)
    return browser.evaluate(
        "[...document.querySelectorAll('table thead th')]"
        f".find(h => h.textContent.trim() === {head!r}).getAttribute('aria-sort')"
    )


def test_a_click_on_a_head_sorts_numbers_as_numbers_and_another_turns_them_round(
    browser: Browser, pages: dict[str, str]
) -> None:
    browser.open(pages["one"], 1280)
    before = column(browser, "policy")
    assert click(browser, "speedup") == "ascending"
    ascending = column(browser, "speedup")
    numbers = [float(text.split()[0]) for text in ascending]
    # As text, 12 would stand before 2.5.
    assert numbers == sorted(numbers)
    assert numbers[-1] > 10 > numbers[-2] > 2
    assert click(browser, "speedup") == "descending"
    assert column(browser, "speedup") == ascending[::-1]
    assert click(browser, "policy") == "ascending"
    assert sorted(before) == sorted(column(browser, "policy"))  # rows move whole, and none is lost
    assert column(browser, "policy") != before
    only = browser.evaluate("document.querySelectorAll('table')[0].querySelectorAll('[aria-sort=ascending]').length")
    assert only == 1


def test_in_the_dark_text_is_light_and_figures_stay_on_white(browser: Browser, pages: dict[str, str]) -> None:
    colours = "[document.body, document.querySelector('.card')].map(e => getComputedStyle(e).backgroundColor)"
    browser.open(pages["one"], 1280)
    assert browser.evaluate(colours) == ["rgb(255, 255, 255)"] * 2
    browser.open(pages["one"], 1280, dark=True)
    body, card = browser.evaluate(colours)
    assert card == "rgb(255, 255, 255)"
    assert max(map(int, body.removeprefix("rgb(").removesuffix(")").split(", "))) < 64
