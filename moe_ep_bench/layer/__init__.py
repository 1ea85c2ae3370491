"""A real Megatron-Core MoE layer with our policies inside, on GPUs or on CPU ranks.

``megatron``  the one door to Megatron-Core: import, versions, its traps
``host``      stand-ins that let the same code run on CPU ranks
``build``     configs and layers
``router``    the seam: replayed scores, and a policy in place of top-k
``experts``   expert weights seeded by global expert id
``parts``     what computes the experts and what permutes: asked for, and what runs
``backends``  the experts: ours in grouped GEMMs, and Megatron-Core's
``permutation`` the dispatcher with permutations by index
``stages``    which method of the layer is which phase
``phases``    exclusive timers and waiting probes on those stages
``reference`` the slow dense oracle that every case is held against
"""
