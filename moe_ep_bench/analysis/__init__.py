"""From a run's files to speedups, tables and figures. Reads ``run.json``, conditions and Parquet, and nothing else.

The data flow: ``load`` with ``parts`` (files, checked; ``gather``: several directories) -> ``timing`` and ``fidelity``
(numbers of one case) -> ``speedups`` (cases set against their baseline) -> ``frames`` (a row per case) -> ``tables``,
printed by ``render``, and ``figures``, which take their looks from ``style`` and leave their numbers by
``marks``. ``show`` and ``plot`` are the commands; ``words`` holds what tables and figures must say alike, and
what stands below them.
"""
