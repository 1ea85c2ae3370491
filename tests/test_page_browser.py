"""The report in a real browser: headless Chromium opens it, sorts its tables and measures what it shows."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from results_builder import FakeCase, FakeComparison, standard_cases, write_run, write_whole

from moe_ep_bench.analysis.page import write_report

pytestmark = pytest.mark.browser

WIDTHS = (1280, 400)
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
LONG = "a_policy_with_a_long_name_" * 4


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A page of one comparison, with all that may go wrong in it, of a sweep, and of whole models."""
    folder = tmp_path_factory.mktemp("pages")
    cases = [
        *standard_cases(),
        FakeCase("oea", params={"k0": HOSTILE}, speedup=2.5),
        FakeCase(LONG, speedup=12.0, dropped=0.3),
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
    return {name: write_report([folder / name])[0] for name in ("one", "sweep", "whole")}


# A frame as wide as a test says, and the values of expressions in it.
FRAME = """<!DOCTYPE html><style>iframe {{ border: 0; width: {width}px; height: 900px }}</style>
<pre></pre><iframe srcdoc="{page}"></iframe><script>
const frame = document.querySelector("iframe"), pre = document.querySelector("pre");
const values = (window, document) => [{expressions}];
frame.onload = () => {{ pre.textContent = JSON.stringify(values(frame.contentWindow, frame.contentDocument)); }};
</script>"""


def shown(page: Path, width: int, *expressions: str, dark: bool = False) -> list[Any]:
    """What JavaScript finds in a page, one expression after another; the console says nothing of it.

    A policy in the page forbids to load anything, and the console names what tries.
    """
    chromium = shutil.which("chromium")
    assert chromium is not None, "chromium is not installed: apt-get install chromium"
    frame = page.with_name("frame.html")
    listed = ", ".join(f"({expression})" for expression in expressions)
    frame.write_text(FRAME.format(width=width, page=html.escape(page.read_text()), expressions=listed))
    profile = [f"--user-data-dir={page.parent / 'profile'}", "--virtual-time-budget=20000", "--window-size=1400,900"]
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", *profile]
    options += ["--force-dark-mode"] * dark
    command = [chromium, *options, "--dump-dom", frame.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    assert re.findall(":CONSOLE.*", done.stderr) == []
    return json.loads(html.unescape(re.search("<pre>(.*)</pre>", done.stdout)[1]))


# Sizes of images and their boxes.
IMAGES = """[...document.images].map(i => { const box = i.getBoundingClientRect();
  return [i.naturalWidth, i.naturalHeight, box.width, box.height, i.alt.length]; })"""
OPEN = "document.querySelectorAll('details').forEach(d => { d.open = true; })"
# Of every text that is shown.
FONT_SIZES = """(() => { const sizes = [], walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) { const e = walk.currentNode.parentElement;
    if (walk.currentNode.textContent.trim() && e.getClientRects().length)
      sizes.push(parseFloat(window.getComputedStyle(e).fontSize)); } return sizes; })()"""


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["one", "sweep", "whole"])
def test_a_page_loads_whole_quiet_and_legible(pages: dict[str, Path], name: str, width: int) -> None:
    """It never scrolls sideways, with all that can be opened open: wide things have boxes of their own."""
    extent = "[window.innerWidth, document.documentElement.scrollWidth]"
    figures, _, (viewport, content), sizes = shown(pages[name], width, IMAGES, OPEN, extent, FONT_SIZES)
    assert len(figures) >= 4
    assert all(min(figure) > 0 for figure in figures), figures
    assert max(box for _, _, box, *_ in figures) > 0.7 * width
    assert viewport == width
    assert content <= width
    assert len(sizes) > 100
    assert min(sizes) >= 12


def column(head: str) -> str:
    """The texts of a column of the first table, from top to bottom."""
    return (
        "(() => { const table = document.querySelector('table'), heads = [...table.tHead.rows[0].cells];"
        f" const at = heads.findIndex(h => h.textContent.trim() === {head!r});"
        " return [...table.tBodies[0].rows].map(row => row.cells[at].textContent.trim()); })()"
    )


def click(head: str) -> str:
    """Click a head of the first table; what all of them then say of their order."""
    return (
        "(() => { const heads = [...document.querySelector('table').tHead.rows[0].cells];"
        f" heads.find(h => h.textContent.trim() === {head!r}).querySelector('button').click();"
        " return heads.map(h => h.getAttribute('aria-sort')).filter(order => order !== 'none'); })()"
    )


def test_a_click_on_a_head_sorts_numbers_as_numbers_and_another_turns_them_round(pages: dict[str, Path]) -> None:
    speedups, policies = [click("speedup"), column("speedup")], [click("policy"), column("policy")]
    before, first, ascending, second, descending, third, after = shown(
        pages["one"], 1280, column("policy"), *speedups, *speedups, *policies
    )
    assert (first, second, third) == (["ascending"], ["descending"], ["ascending"])
    numbers = [float(text.split()[0]) for text in ascending]
    assert numbers == sorted(numbers)
    assert numbers[-1] > 10 > numbers[-2] > 2, "as text, 12 would stand before 2.5"
    assert descending == ascending[::-1]
    assert sorted(before) == sorted(after)
    assert after != before, "rows move whole, and none is lost"


def test_in_the_dark_text_is_light_and_figures_stay_on_white(pages: dict[str, Path]) -> None:
    colours = "[document.body, document.querySelector('.card')].map(e => window.getComputedStyle(e).backgroundColor)"
    assert shown(pages["one"], 1280, colours) == [["rgb(255, 255, 255)"] * 2]
    ((body, card),) = shown(pages["one"], 1280, colours, dark=True)
    assert card == "rgb(255, 255, 255)"
    assert max(map(int, body.removeprefix("rgb(").removesuffix(")").split(", "))) < 64
