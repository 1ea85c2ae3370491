"""Plans, points and runners. From ``run CONFIG`` to a row of Parquet:

``cli/__init__``      reads the command line
``bench/commands``    has torchrun start ranks, which agree and measure what is left, under a guard
``bench/plan``        config -> points (``point``), with their cases, workloads and ids; ranks get them as JSON
``bench/tokens``      a point, a layer, a batch and a rank -> tokens
``bench/routing``     a case and tokens -> routing, and what all ranks' earlier routing decides
``bench/measure``     the protocol: check, warm up, time, check again
``bench/real_ranks``  its steps on this rank among others
``layer/stack``       Megatron-Core's layers in both forms, native and policy
``timing/protocol``   the measuring loop; ``timing/timer`` is one iteration
``bench/result``      what was found on all ranks -> columns
``results``           columns -> an atomic part

``emulate`` and ``advise`` differ in the runner: ``emulated_ranks`` routes each batch on all ranks (``traffic``) and
sets their times side by side, of a modelled device or (``virtual_ranks``) of this one. ``route`` ends at ``traffic``.
Beside that path

``checks``            what a config asks for and a backend cannot do
``description``       a point in ``run.json``
``inspection``        what layers chose and computed in one run
``job``               what this rank keeps of what it tries
``layer_runner``      what real and virtual ranks share: a layer that is put in place and timed
``meetings``          what links take for what virtual ranks exchange
``paired_run``        emulated ranks beside real ones, for ``validate``
``advise_config``     what ``advise`` is asked -> a config and its plan
"""
