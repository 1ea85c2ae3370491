"""Plans, sessions and backends. From ``run CONFIG`` to a row of Parquet in nine files:

``cli/__init__``      reads the command line
``bench/run``         has torchrun start ranks, which agree and measure what is left, under a guard
``bench/plan``        config -> comparisons (``comparison``), with their cases, workloads and ids
``bench/session``     this rank's layers, batches and cases
``bench/measuring``   the steps of their measurement, which ranks take together
``bench/routing``     a rank's tokens as a case sees them, and how it routes them
``layer/stack``       Megatron-Core's layers in both forms, native and policy
``timing/protocol``   the measuring loop; ``timing/timer`` is one iteration
``bench/rows``        samples and metrics of all ranks -> columns
``results``           columns -> an atomic part

``emulate`` and ``advise`` differ in the middle: ``traffic`` routes all ranks' batches, and ``virtual`` sets one rank
after another side by side. ``route`` ends behind ``traffic``. Beside that path

``checks``            what a config asks for and a backend cannot do
``description``       a comparison in ``run.json``
``inspection``        what layers chose and computed, held against the reference
``job``               what this rank keeps of what it tries
``measured_ranks``    many ranks on the device that is here: their times, and their values beside the reference
``question``          what ``advise`` is asked -> a config and its plan
``validate``          emulated ranks beside real ones
"""
