"""From a run's files to speedups, a table and figures. Reads ``run.json``, conditions and Parquet, and nothing else.

The data flow: ``load`` (files, checked) -> ``timing`` and ``fidelity`` (numbers of one case) -> ``speedups`` (cases
set against their baseline) -> ``summary`` (text) and ``figures`` (``lines`` and ``bars``, which take their looks from
``style``). ``words`` holds what text and figures must say alike. Apart from all this, ``trace_report`` and
``trace_figures`` show what a recording holds.
"""
