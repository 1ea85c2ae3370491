"""Inside a server that people use: record its routing, and serve under a policy (``serving.vllm``)."""
