"""Draw the figures of a results directory: ``python plot_results.py DIR``. The figures land in ``DIR/figures``."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

from moe_ep_bench.analysis.figures import (
    ALL_FIGURES,
    DECODE_FIGURES,
    FIGURES,
    GRAPH_FIGURES,
    SWEEP_FIGURES,
    draw_figures,
)
from moe_ep_bench.analysis.load import ResultsError, load_run
from moe_ep_bench.analysis.route_figures import ROUTE_FIGURES, draw_route_figures
from moe_ep_bench.analysis.route_load import is_route, load_route
from moe_ep_bench.analysis.style import FORMATS


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", metavar="DIR", type=Path, help="what `moe-ep-bench run` or `route` wrote")
    parser.add_argument("--format", default=",".join(FORMATS), help="comma-separated (default: %(default)s)")
    parser.add_argument(
        "--figures",
        help=f"comma-separated, of a run: {', '.join(FIGURES)}; of a sweep too: {', '.join(SWEEP_FIGURES)}; of decode "
        f"steps too: {', '.join(DECODE_FIGURES)}; of layers replayed from CUDA graphs too: "
        f"{', '.join(GRAPH_FIGURES)}; of routing: {', '.join(ROUTE_FIGURES)} (default: all)",
    )
    options = parser.parse_args(arguments)
    known = ROUTE_FIGURES if is_route(options.directory) else ALL_FIGURES
    figures_dir = options.directory / "figures"
    try:
        formats = _names("--format", options.format, FORMATS)
        figures = None if options.figures is None else _names("--figures", options.figures, known)
        if known is ROUTE_FIGURES:
            written, lacking = draw_route_figures(
                load_route(options.directory), figures_dir, formats, figures or tuple(ROUTE_FIGURES)
            )
        else:
            written, lacking = draw_figures(load_run(options.directory), figures_dir, formats, figures)
    except (ResultsError, OSError) as error:
        print(f"plot_results.py: {error}", file=sys.stderr)
        return 2
    for name in lacking:
        print(f"plot_results.py: {name}: not drawn, the run has no rows for it", file=sys.stderr)
    for path in written:
        print(os.path.relpath(path))
    return 0


def _names(option: str, text: str, known: Collection[str]) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in known:
            raise ResultsError(f"{option}: expected some of {', '.join(known)}; got {name!r}")
    return names


if __name__ == "__main__":
    sys.exit(main())
