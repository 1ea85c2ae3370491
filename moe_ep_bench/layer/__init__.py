"""A real Megatron-Core MoE layer or model with our policies inside, on GPUs, CPU ranks or virtual ranks."""
