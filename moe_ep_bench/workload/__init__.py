"""Inputs of the layer: tokens and their router scores.

How long an MoE layer takes under expert parallelism depends less on the tokens than on where the router sends them:
the busiest expert's rank is late, and all others wait. So a policy's speedup is a statement about a *distribution of
router scores*. ``SyntheticWorkload`` solves for targets; ``RecordedWorkload`` replays what a real model's router did.
"""
