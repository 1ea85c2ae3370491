"""From results directories to one frame, and from it to tables, figures and answers.

The data flow: ``store`` (all kinds of results under one key, a frame per table of Parquet, samples pivoted; ``draws``
of one traffic joined) -> ``reduce`` (ranks joined, ratios formed) -> ``cases`` (the frame: a row per case); beside it
``answer_costs`` (rows of ``quality``) and ``paper_claims`` (papers' numbers and ours). Specifications are data:
``columns`` (each column once, and tables rendered), ``tables`` (views) with ``notes``, ``figures`` (rows that
``drawing`` draws by ``marks`` and ``style``; ``lines`` is any column over any other). ``page`` has all of them;
``compare`` sets two runs side by side, of two jobs or of real and emulated ranks. ``show``, ``plot`` and
``advise`` are commands.
"""
