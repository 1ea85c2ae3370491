"""What an inference-time MoE routing policy is worth under expert parallelism."""

__version__ = "0.1.0"
