"""From a run's files to speedups, a table and figures. Reads ``run.json`` and Parquet, and nothing else.

The data flow: ``load`` (files, validated) -> ``timing`` and ``fidelity`` (numbers of one case) -> ``speedups``
(cases set against their baseline) -> ``summary`` (text) and ``figures`` (which take their looks from ``style``).
"""
