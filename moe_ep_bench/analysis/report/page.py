"""Set a report as one HTML file: the template, its style and its script, and the figures as data.

Figures are images with their bytes in the page, not SVG among the HTML: matplotlib gives the parts of every figure the
same ids, and an image runs no script, whatever a label holds. They are SVG, sharp at every width, unless that takes
more than ``MAX_SVG_BYTES``, as with many thousand marks: then PNG. A policy in the page forbids it to load anything,
so that a browser itself vouches for "no network". Equal input gives equal bytes.
"""

from __future__ import annotations

import base64
import hashlib
import io
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.figure import Figure

from moe_ep_bench.analysis.load import ResultsError, is_quality, is_whole
from moe_ep_bench.analysis.report.models import whole_report_of
from moe_ep_bench.analysis.report.parts import Picture, Report
from moe_ep_bench.analysis.report.routing import route_report_of
from moe_ep_bench.analysis.report.said import report_of
from moe_ep_bench.analysis.route_load import is_route
from moe_ep_bench.analysis.style import FORMATS, house_style
from moe_ep_bench.analysis.validation import is_validation
from moe_ep_bench.files import atomic_path, check_folder

MAX_SVG_BYTES = 400_000

# CSS pixels per inch: the size at which a sheet's text has the size that it says.
_PIXELS = 96
# Below this share of that size labels are too small to read: the sheet's box scrolls then.
_LEAST_SCALE = 0.72
_FORMATS = {"svg": "image/svg+xml", "png": "image/png"}


@dataclass(frozen=True)
class _Image:
    """An image in the page; sizes in CSS pixels."""

    title: str
    caption: str
    name: str
    uri: str
    width: int
    height: int
    least_width: int


def write_report(directory: Path, out: Path | None = None) -> tuple[Path, list[str]]:
    """Write the report of what ``run``, ``emulate`` or ``route`` left; it appears whole or not at all.

    Args:
        out: the file; None = ``report.html`` in the directory.

    Returns:
        The file, and a line for each thing that could not be trusted and was left out.

    Raises:
        ResultsError: one line: what is there cannot be read, or is of another kind; or ``out`` is a directory.
    """
    if out is not None:
        check_folder(out.parent, "--out: folder")
    out = directory / "report.html" if out is None else out
    if out.is_dir():
        raise ResultsError(f"--out {out}: expected a file to write, got a directory")
    if is_validation(directory):
        raise ResultsError(f"{directory}: holds two runs side by side; report {directory}/real or {directory}/emulated")
    if is_quality(directory):
        raise ResultsError(
            f"{directory}: holds what policies do to a model's answers, of which there is no page; "
            "`moe-ep-bench show` and `plot` show it"
        )
    passed_over: list[str] = []
    page = page_of(_report_of(directory)(directory, passed_over))
    with atomic_path(out) as temporary:
        temporary.write_text(page, encoding="utf-8")
    return out, passed_over


def _report_of(directory: Path) -> Callable[[Path, list[str]], Report]:
    """What reads a directory, by what it holds."""
    if is_route(directory):
        return route_report_of
    return whole_report_of if is_whole(directory) else report_of


def page_of(report: Report) -> str:
    """The whole page as text."""
    # Every value is escaped; what is trusted are the style and the script, which hold none.
    environment = Environment(
        loader=PackageLoader("moe_ep_bench", "analysis/report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    folder = files("moe_ep_bench.analysis.report")
    style, script = (folder.joinpath(name).read_text(encoding="utf-8") for name in ("report.css", "report.js"))
    script_hash = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    with house_style():
        images = [_image(picture) for picture in report.pictures]
    return environment.get_template("report.html").render(
        report=report, images=images, style=Markup(style), script=Markup(script), script_hash=script_hash
    )


def _image(picture: Picture) -> _Image:
    kind, content = "svg", _encoded(picture.figure, "svg")
    if len(content) > MAX_SVG_BYTES:
        kind, content = "png", _encoded(picture.figure, "png")
    width, height = (round(inches * _PIXELS) for inches in picture.figure.get_size_inches())
    return _Image(
        picture.title,
        picture.caption,
        picture.name,
        f"data:{_FORMATS[kind]};base64,{base64.b64encode(content).decode()}",
        width,
        height,
        round(_LEAST_SCALE * width),
    )


def _encoded(figure: Figure, file_format: str) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format=file_format, metadata=FORMATS[file_format])
    return buffer.getvalue()
