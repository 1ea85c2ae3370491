"""Plans, sessions and backends. From ``run CONFIG`` to a row of Parquet in ten files:

``cli/__init__``     reads the command line
``bench/run``        has torchrun start ranks; ranks agree and find what is left to measure
``bench/plan``       config -> comparisons with their cases and ids
``bench/subjects``   what a comparison measures: a layer or a model, with its workloads
``bench/job``        comparison after comparison, under a watchdog and with a mark of what is being tried
``bench/session``    builds this rank's layers and batches, and takes the steps of a measurement
``layer/stack``      Megatron-Core's layers in both forms, native and policy
``timing/protocol``  the measuring loop; ``timing/timer`` is one iteration
``bench/rows``       samples and metrics of all ranks -> columns
``results``          columns -> an atomic part
"""
