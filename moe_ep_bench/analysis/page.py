"""Results directories as one HTML page that can be sent to somebody and needs no network.

The page begins with the answer of ``advise``, where it was asked, and one screen of findings. Then come the views that
``show`` prints, with a few that only a page has room for, the figures, what weakens them, and where they come from.
Figures are PNGs with their bytes in the page. One script, which sorts tables by a column, is in it too;
a policy in the page forbids all others, and to load anything. Equal input gives equal bytes.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from moe_ep_bench.analysis.advice import advice_lines, read_advices
from moe_ep_bench.analysis.cases import cases, comparisons, differs_from_topk, load
from moe_ep_bench.analysis.columns import COLUMNS, SAME_KERNELS
from moe_ep_bench.analysis.drawing import Drawing
from moe_ep_bench.analysis.notes import NO_TIMES, warnings
from moe_ep_bench.analysis.plot import drawings
from moe_ep_bench.analysis.store import Store, jobs
from moe_ep_bench.analysis.style import FORMATS, house_style, settle
from moe_ep_bench.analysis.tables import VIEWS, count_words, fastest, tables
from moe_ep_bench.facts.words import how_parts, links_parts, ran_on_parts, said_once
from moe_ep_bench.files import check_folder, dump_yaml, write_text
from moe_ep_bench.results import ResultsError

# CSS pixels per inch: the size at which a sheet's text has the size that it says.
_PIXELS = 96
# Below this share of that size labels are too small to read: the sheet's box scrolls then.
_LEAST_SCALE = 0.72
_MOST_FINDINGS = 12


def write_report(directories: Sequence[Path], out: Path | None = None) -> tuple[Path, list[str]]:
    """Write the page of results of any kind; it appears whole or not at all.

    Args:
        out: the file; None = ``report.html`` in the one directory.

    Returns:
        The file, and a line for each thing that could not be trusted and was left out.
    """
    if out is not None:
        check_folder(out.parent, "--out: folder")
    elif len(directories) > 1:
        raise ResultsError("--out: expected a file for the page of several directories")
    else:
        out = directories[0] / "report.html"
    if out.is_dir():
        raise ResultsError(f"--out {out}: expected a file to write, got a directory")
    passed_over: list[str] = []
    with house_style():
        page = page_of(directories, passed_over)
    write_text(out, page)
    return out, passed_over


def page_of(directories: Sequence[Path], passed_over: list[str]) -> str:
    """The whole page as text; ``passed_over`` gets a line for each thing that is left out."""
    store = load(list(directories), passed_over)
    frame, facts = cases(store), comparisons(store)
    frame = frame.assign(differs_from_topk=differs_from_topk(frame))
    advised = read_advices(directories, passed_over)
    # An answer's first figure shows the ranks of its pick.
    figures = sorted(drawings(store, passed_over).items(), key=lambda one: bool(advised) and "ranks" not in one[0])
    images = [_image(*one) for one in figures]
    environment = Environment(
        loader=PackageLoader("moe_ep_bench", "analysis"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["yaml"] = lambda content: dump_yaml(
        json.loads(json.dumps(content, default=str)), allow_unicode=True, width=120
    )
    script = files("moe_ep_bench.analysis").joinpath("report.js").read_text(encoding="utf-8")
    return environment.get_template("report.html").render(
        names=[directory.resolve().name for directory in directories],
        titles=list(facts["title"].unique()),
        models=list(facts["model"].unique()),
        line=_line(store),
        advice=[line for one in advised for block in advice_lines(one) for line in block.splitlines()],
        fastest=fastest(frame).sort_values("speedup_median", ascending=False).head(_MOST_FINDINGS).to_dict("records"),
        shown=lambda row, name: COLUMNS[name].shown(row),
        same_kernels=SAME_KERNELS,
        passed_over=passed_over,
        lost=frame[frame["status"] != "ok"].to_dict("records"),
        warnings=[line.text for line in warnings(store)],
        images=images,
        tables=tables(store, list(VIEWS)),
        jobs=jobs(store).to_dict("records"),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def _line(store: Store) -> str:
    """How, and on what, the numbers came about, without what a model is made of."""
    links = said_once(links_parts(one.facts, in_column=True) for one in store.comparisons)
    ran_on = said_once(ran_on_parts(one.run.environment, one.facts, in_short=True) for one in store.comparisons)
    on = ", ".join(filter(None, (ran_on, links and f"links {links}")))
    words = f"{said_once(how_parts(one.run, one.facts) for one in store.comparisons)}{on and f': {on}'}"
    random = any(getattr(one.facts, "random_weights", False) for one in store.comparisons)
    notes = [count_words(cases(store)), *["weights are random"] * random]
    notes += [NO_TIMES] if cases(store)["median_ms"].isna().all() else []
    return f"{words[:1].upper()}{words[1:]}; {'; '.join(notes)}."


def _image(name: str, drawing: Drawing) -> dict[str, Any]:
    """A figure as the template wants it: its title, its own line on how to read it, and its bytes."""
    figure, content = drawing.figure, io.BytesIO()
    settle(figure)  # the layout's last bits differ from run to run until it is fixed
    figure.savefig(content, format="png", metadata=FORMATS["png"])
    width, height = (round(inches * _PIXELS) for inches in figure.get_size_inches())
    uri = f"data:image/png;base64,{base64.b64encode(content.getvalue()).decode()}"
    size = {"width": width, "height": height, "least_width": round(_LEAST_SCALE * width)}
    return {"name": name, "title": drawing.title, "caption": drawing.how, "uri": uri, **size}
