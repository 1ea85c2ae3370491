"""What an inference-time MoE routing policy is worth under expert parallelism."""

__version__ = "1.0.0"
