"""From results directories to one frame, and from it to tables, figures and answers.

The data flow: ``store`` (a long frame per table, of run.json and Parquet; draws of one traffic joined) -> ``reduce``
(ranks joined, ratios formed) -> ``cases`` (the frame: a row per case). All else reads that: ``tables`` (views) with
``notes``, ``figures`` (rows of a table that ``drawing`` draws by ``marks`` and ``style``; it draws any column against
any other too), ``page``, ``compare``, ``advise``, ``papers`` and ``validate``. ``columns`` names each column once and
renders tables; ``show`` and ``plot`` are the commands.
"""
