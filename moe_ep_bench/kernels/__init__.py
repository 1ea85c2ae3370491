"""Compiled twins of memory-bound steps, each equal to a torch formula beside it."""
