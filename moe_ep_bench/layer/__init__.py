"""A real Megatron-Core MoE layer with our policies inside, on GPUs or on CPU ranks.

``megatron``    the one door to Megatron-Core: import, versions, its traps
``host``        stand-ins that let the same code run on CPU ranks
``configs``     Megatron-Core's configs of layers and models
``build``       what is measured: a layer alone, or a whole model
``router``      the seam: replayed scores, and a policy in place of top-k
``parts``       implementations of experts, dispatcher and permutation: asked for, and what runs
``experts``     expert weights seeded by global expert id
``backends``    what computes the experts: ours in grouped GEMMs, and Megatron-Core's
``dispatchers`` what moves tokens to experts: ours by index or by map, for slices, and DeepEP's
``attention``   attention of a whole model by torch's kernels
``passes``      batches of a whole model: prompts, or one new token of each request
``stages``      which method of the layer is which phase
``phases``      exclusive timers and waiting probes on those stages, through all layers of a model too
``graphs``      a run as CUDA graphs
``virtual``     many ranks on one device, one after another
``expert_placement`` experts in slots, for placements other than Megatron-Core's
``reference``   the slow dense oracle that every case is held against
"""
