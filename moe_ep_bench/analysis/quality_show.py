"""Show a directory of ``quality``: tables and orderings of its texts, tables of its tasks, and figures."""

from __future__ import annotations

from pathlib import Path

from moe_ep_bench.analysis.accuracy_report import AnsweredTask, accuracy_text, load_accuracy_results
from moe_ep_bench.analysis.quality_orderings import quality_text
from moe_ep_bench.analysis.quality_report import JudgedComparison, load_quality_results


def quality_summary(directory: Path) -> str:
    """All tables.

    Raises:
        ResultsError: see ``finished_comparisons``.
    """
    return _tables(load_quality_results(directory), load_accuracy_results(directory))


def show_quality(directory: Path) -> str:
    """All tables, after drawing the texts' figures into the directory.

    Raises:
        ResultsError: see ``finished_comparisons``.
    """
    from moe_ep_bench.analysis.quality_figures import draw_quality_figures
    from moe_ep_bench.analysis.route_report import drawn_words

    texts = load_quality_results(directory)
    tables = _tables(texts, load_accuracy_results(directory))
    if not texts:
        return tables
    return f"{tables}\n{drawn_words(*draw_quality_figures(texts, directory / 'figures'))}"


def _tables(texts: list[JudgedComparison], tasks: list[AnsweredTask]) -> str:
    return "\n\n".join(part for part in (quality_text(texts), accuracy_text(tasks)) if part)
