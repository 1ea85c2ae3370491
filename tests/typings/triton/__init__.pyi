# Triton compiles a kernel from its source text, whose names are not those types of Python that its package states.
from typing import Any

def __getattr__(name: str) -> Any: ...
