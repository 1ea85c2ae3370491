"""How many tokens of a batch, and of how many ranks, stand for all, so that a large question takes a minute."""

from __future__ import annotations

from collections.abc import Sequence

from moe_ep_bench.config import Experiment, SyntheticConfig

# Of more scores than that tokens stand for others, though every rank draws some: all would take minutes.
SCORES, _TOKENS_OF_RANK = 2**22, 256
# Of more ranks than that some ranks' tokens stand for others': of at least so many ranks, and with so many scores.
MOST_RANKS, _SOURCES, _SOURCE_SCORES = 64, 16, 2**20


def sample_of(asked: Sequence[Experiment], most_scores: int) -> dict[str, int]:
    """Keys of ``emulate`` by which some tokens stand for others in all that is asked; none where all are routed."""
    sizes, ranks = {one.workload.total_tokens(one.virtual_ranks) for one in asked}, {one.virtual_ranks for one in asked}
    if not all(map(_is_exchangeable, asked)) or len(sizes) > 1:
        return {}
    sources = max(_num_sources(one, most_scores) for one in asked)
    of_ranks = {"sample_ranks": sources} if len(ranks) == 1 and sources < min(ranks) else {}
    sample = max(_num_routed(one, most_scores, **of_ranks) for one in asked)
    return {"sample_tokens": sample, **of_ranks} if sample < sizes.pop() else {}


def routed_tokens(experiment: Experiment, most_scores: int) -> int:
    """Tokens of a batch that are routed, and stand for all where these have more scores."""
    num_tokens = experiment.workload.total_tokens(experiment.virtual_ranks)
    return sample_of([experiment], most_scores).get("sample_tokens", num_tokens)


def _num_sources(experiment: Experiment, most_scores: int) -> int:
    """Ranks whose tokens are drawn, and stand for those of all: of many ranks with many tokens, few."""
    num_ranks, num_experts = experiment.virtual_ranks, experiment.model.spec().num_experts
    num_tokens, sources = experiment.workload.total_tokens(num_ranks), _SOURCES
    if num_ranks <= MOST_RANKS:
        return num_ranks
    fewest = min(most_scores, _SOURCE_SCORES)
    while sources < num_ranks and num_tokens * sources * num_experts < fewest * num_ranks:
        sources *= 2
    are_alike = num_ranks % sources == 0 and num_tokens % (num_ranks // sources) == 0
    return sources if are_alike else num_ranks


def _num_routed(experiment: Experiment, most_scores: int, sample_ranks: int | None = None) -> int:
    """Tokens of so many ranks that are routed; None = of all."""
    num_ranks, num_experts = experiment.virtual_ranks, experiment.model.spec().num_experts
    num_sources = sample_ranks or num_ranks
    num_tokens = experiment.workload.total_tokens(num_ranks) * num_sources // num_ranks
    fewest = max(most_scores // num_experts, _TOKENS_OF_RANK * num_sources)
    while num_tokens % 2 == 0 and num_tokens // 2 >= fewest:
        num_tokens //= 2
    return num_tokens


def _is_exchangeable(experiment: Experiment) -> bool:
    """Whether any of a batch's tokens may stand for others."""
    workload = experiment.workload
    own = workload.tokens_of_ranks is not None or workload.padding_per_rank
    return experiment.scope == "layer" and isinstance(workload, SyntheticConfig) and not own
