"""What the tests of routing policies share: specs of every policy, scores and contexts of every shape."""

from __future__ import annotations

import atexit
import functools
import itertools
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from moe_ep_bench.config import label_of
from moe_ep_bench.kernels import form_of
from moe_ep_bench.policies import Routing, RoutingContext, make_policy

Spec = dict[str, Any]
Arguments = dict[str, Any]  # of a RoutingContext; ``seed`` stands for a fresh generator

METRICS = ("score", "order", "reverse_order", "random")
GRANULARITIES = ("expert", "device")
MODALITIES = ("uniform", "image_first", "text_first")
EXPANSIONS = (
    {},
    {"num_candidates": 2},
    {"num_candidates": 3, "scope": "global"},
    {"max_experts_per_token": 2},
    {"num_candidates": 1, "scope": "global", "max_experts_per_token": 3},
)

SERE_RULES = (
    {"k0": 1},
    {"k0": 2, "threshold": 0.5},
    {"k0": 1, "threshold": 0.75, "layer": 0},
    {"k0": 1, "threshold": 1},
    {"k0": 10_000},
)
_FOLDER = Path(tempfile.mkdtemp(prefix="similarity-"))
atexit.register(shutil.rmtree, _FOLDER, ignore_errors=True)


@functools.cache
def similarity_file(num_experts: int, num_layers: int = 1) -> str:
    """How alike so many experts are, in few levels, so that many tie."""
    path = _FOLDER / f"{num_experts}-{num_layers}.safetensors"
    generator = torch.Generator().manual_seed(num_experts)
    similarity_LEE = torch.randint(0, 5, [num_layers, num_experts, num_experts], generator=generator) / 4
    similarity_LEE = torch.maximum(similarity_LEE, similarity_LEE.transpose(1, 2))
    similarity_LEE[:, range(num_experts), range(num_experts)] = 1
    save_file({"similarity": similarity_LEE}, path, metadata={"format": "moe-similarity-v1", "model": "made up"})
    return str(path)


# Every metric with every modality and with every granularity, and of each other field at least two values.
_RULES = [
    {"capacity_factor": 0.7, "metric": metric, "granularity": GRANULARITIES[place % 2], "modality": modality}
    for place, (metric, modality) in enumerate(itertools.product(METRICS, MODALITIES))
]
SPECS: list[Spec] = [
    {"name": "topk"},
    *({"name": "token_drop", **rule} for rule in _RULES),
    {"name": "token_drop", "capacity_factor": 0},
    {"name": "token_drop", "capacity_factor": 1.5, "granularity": "device"},
    *(
        {"name": "expanded_drop", **rule, **expansion}
        for rule, expansion in zip(_RULES, itertools.cycle(EXPANSIONS), strict=False)
    ),
    {"name": "expanded_drop", "capacity_factor": 1e6, "num_candidates": 10_000, "scope": "global"},
    {"name": "expanded_drop", "capacity_factor": 1.0, "num_candidates": 10_000},
    {"name": "expanded_drop", "capacity_factor": 1.2, "granularity": "device", "max_experts_per_token": 1},
    {"name": "expert_drop"},
    {"name": "expert_drop", "fraction": 0.7},
    {"name": "expert_drop", "fraction": 1},
    *({"name": "budget_drop", "max_dropped": share} for share in (0, 0.07, 0.29, 1)),
    *({"name": "budget_drop", "max_lost_mass": share} for share in (0, 0.01, 0.2)),
    {"name": "pruned", "k0": 1},
    {"name": "pruned", "k0": 3, "p": 0.5},
    {"name": "pruned", "k0": 10_000, "p": 0.9},
    {"name": "oea", "k0": 1},
    {"name": "oea", "k0": 5, "k_max": 2},
    {"name": "oea", "k0": 2, "k_max": 12},
    {"name": "oea", "k0": 2, "max_rank": 4},
    {"name": "oea", "k0": 5, "max_rank": 2, "k_max": 10_000},
    {"name": "oea", "k0": 2, "p": 0.3, "k_max": 6, "max_rank": 9},
    {"name": "laser", "eps_high": 0.5, "t_fix": 0.5, "c": 8},
    {"name": "laser", "eps_high": 0.9, "t_fix": 0.05, "c": 10_000},
    {"name": "laser", "eps_high": 1, "t_fix": 0, "c": 12},
    {"name": "laser", "eps_high": 0, "t_fix": 0, "c": 9},
    {"name": "laser", "eps_high": 0.8, "t_fix": 0.1, "c": 1},
    {"name": "laser", "eps_high": 0.8, "t_fix": 0.02, "c": 10, "trim": "random"},
    {"name": "load_only"},
    {"name": "xshare", "k0": 1, "budget": 0},
    {"name": "xshare", "k0": 0, "budget": 3},
    {"name": "xshare", "k0": 2, "budget": 4},
    {"name": "xshare", "k0": 0, "budget": 10_000},
    {"name": "xshare", "k0": 10_000, "budget": 1},
    {"name": "xshare", "k0": 0, "mass_threshold": 0.5},
    {"name": "xshare", "k0": 1, "mass_threshold": 0.9},
    {"name": "xshare", "k0": 0, "mass_threshold": 1},
    {"name": "xshare", "k0": 1, "scope": "request", "request_budget": 2},
    {"name": "xshare", "k0": 0, "scope": "request", "request_budget": 1, "budget": 2},
    {"name": "xshare", "k0": 0, "scope": "rank", "rank_budget": 1},
    {"name": "xshare", "k0": 1, "scope": "rank", "rank_budget": 5},
    {"name": "xshare", "k0": 0, "scope": "rank", "rank_budget": 10_000},
    {"name": "lynx", "num_dropped": 3},
    {"name": "lynx", "num_dropped": 10_000},
    *({"name": "dynamic_skip", "beta": beta} for beta in (0.3, 1)),
]

# Without a form in Triton, or with what only a runner of batches reads.
TORCH_SPECS: list[Spec] = [
    {"name": "laser", "eps_high": 1, "t_fix": 0, "c": 12, "carry_loads": True},
    {"name": "load_only", "carry_loads": True},
    {"name": "token_drop", "capacity_factor": 0.7, "rounding": "ceil"},
    {"name": "expanded_drop", "capacity_factor": 0.3, "rounding": "ceil", "granularity": "device"},
    {"name": "xshare", "scores": "topk", "k0": 1, "budget": 3},
    {"name": "xshare", "scores": "topk", "k0": 10_000, "budget": 1},
    {"name": "xshare", "scores": "topk", "k0": 0, "mass_threshold": 0.5},
    {"name": "xshare", "scores": "topk", "k0": 0, "scope": "request", "request_budget": 2, "budget": 2},
    {"name": "xshare", "scores": "topk", "k0": 1, "scope": "rank", "rank_budget": 2},
    *({"name": "sere", **rule, "similarity": similarity_file(8 << n % 2)} for n, rule in enumerate(SERE_RULES)),
]

# The first of each policy's.
ONE_OF_EACH: list[Spec] = list({spec["name"]: spec for spec in reversed(SPECS + TORCH_SPECS)}.values())
every_spec = pytest.mark.parametrize(
    "spec", SPECS + TORCH_SPECS, ids=lambda spec: label_of(make_policy(spec)).replace(" ", ",")
)
few_examples = settings(max_examples=8)


# --- Making cases ----------------------------------------------------------------------------------


def context_of(arguments: Arguments, device: str = "cpu") -> RoutingContext:
    """A context with a fresh generator, so that every route of a case draws the same numbers."""
    rest = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in arguments.items()}
    return RoutingContext(generator=torch.Generator(device).manual_seed(rest.pop("seed", 0)), **rest)


def route(spec: Spec, scores_TE: Tensor, arguments: Arguments) -> Routing:
    """By what runs on the host; ``test_forms`` holds it to torch."""
    return form_of(make_policy(spec), "cpu").route(scores_TE, context_of(arguments))


def fitted(spec: Spec, scores_TE: Tensor, arguments: Arguments) -> Spec:
    """The spec with LASER's pool size brought into what the case allows, K to E, and similarities of its experts."""
    if "similarity" in spec:
        return {**spec, "similarity": similarity_file(scores_TE.shape[1])}
    if "c" not in spec:
        return spec
    return {**spec, "c": min(max(spec["c"], arguments["top_k"]), scores_TE.shape[1])}


def selected(routing: Routing) -> list[list[int]]:
    """Every token's experts."""
    return [row.nonzero().flatten().tolist() for row in routing.map_TE]


def assert_same(routing: Routing, other: Routing) -> None:
    """Bit for bit."""
    assert torch.equal(routing.map_TE, other.map_TE)
    assert torch.equal(routing.weights_TE, other.weights_TE)


def assert_same_choice(ours: Routing, expected: Routing) -> None:
    """The same pairs to the bit; weights within the rounding of a sum of a few float32."""
    assert ours.map_TE.dtype == torch.bool
    assert ours.weights_TE.dtype == torch.float32
    assert torch.equal(ours.map_TE, expected.map_TE)
    torch.testing.assert_close(ours.weights_TE, expected.weights_TE, rtol=2e-6, atol=1e-30)
    assert not ours.weights_TE[~ours.map_TE].any()


def random_scores(kind: str, num_tokens: int, num_experts: int, seed: int) -> Tensor:
    """Router scores of one kind; some experts are sought after, so that capacities bind."""
    generator = torch.Generator().manual_seed(seed)
    logits_TE = torch.randn([num_tokens, num_experts], generator=generator)
    logits_TE += 1.5 * torch.randn([num_experts], generator=generator)
    match kind:
        case "softmax":
            return logits_TE.softmax(dim=1)
        case "sigmoid":  # rows do not sum to 1
            return logits_TE.sigmoid()
        case "levels":  # heavy ties, zeros among them
            return torch.randint(0, 4, [num_tokens, num_experts], generator=generator) / 4
        case "signed zeros":
            values = torch.tensor([-0.0, 0.0, 0.5])
            return values[torch.randint(0, 3, [num_tokens, num_experts], generator=generator)]
        case "equal":
            return torch.full([num_tokens, num_experts], 1 / 8)
        case "zero rows":
            return logits_TE.softmax(dim=1) * (torch.rand([num_tokens, 1], generator=generator) < 0.5)
    raise AssertionError(kind)


SCORE_KINDS = ("softmax", "sigmoid", "levels", "signed zeros", "equal", "zero rows")


def distinct_scores(num_tokens: int, num_experts: int, seed: int) -> Tensor:
    """No two scores are equal, anywhere."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(num_tokens * num_experts, generator=generator)
    return (order.view(num_tokens, num_experts) + 1.0) / 2**20


def possible_groups(num_experts: int, top_k: int) -> list[tuple[int, int]]:
    """(num_groups, top_groups) that a model with these experts may have."""
    return [
        (groups, top)
        for groups in (2, 4, 8)
        for top in (1, 2, 4)
        if num_experts % groups == 0
        and top <= groups
        and top * (num_experts // groups) >= top_k
        and 1 <= top_k // top <= num_experts // groups
    ]


@st.composite
def cases(draw: st.DrawFn, most_experts: int = 256, most_tokens: int = 40) -> tuple[Tensor, Arguments]:
    """Scores and context arguments: any shape of interest, any option of a model, with and without padding."""
    num_experts = draw(st.sampled_from([size for size in (8, 12, 16, 32, 64, 128, 256) if size <= most_experts]))
    num_tokens = draw(st.integers(0, most_tokens))
    top_k = draw(st.integers(1, 8))
    num_ranks = draw(st.sampled_from([ranks for ranks in range(1, 9) if num_experts % ranks == 0]))
    num_groups, top_groups = draw(st.sampled_from([(None, None), *possible_groups(num_experts, top_k)]))
    seed = draw(st.integers(0, 2**16))
    generator = torch.Generator().manual_seed(seed)

    scores_TE = random_scores(draw(st.sampled_from(SCORE_KINDS)), num_tokens, num_experts, seed)
    bias_E = None
    if draw(st.booleans()):  # of few levels and both signs: ties survive, preferences turn negative
        bias_E = torch.randint(-4, 5, [num_experts], generator=generator) / 4
    if num_groups is not None:  # a group's value is a sum: keep it exact (see oracles)
        scores_TE = (scores_TE * 2**20).round() / 2**20
    token_mask_T = None
    if draw(st.booleans()):
        token_mask_T = torch.rand([num_tokens], generator=generator) < draw(st.sampled_from([0.0, 0.7]))
    return scores_TE, {
        "top_k": top_k,
        "num_ranks": num_ranks,
        "rank": draw(st.integers(0, num_ranks - 1)),
        "normalize": draw(st.booleans()),
        "scale": draw(st.sampled_from([1.0, 2.5])),
        "bias_E": bias_E,
        "num_groups": num_groups,
        "top_groups": top_groups,
        "token_mask_T": token_mask_T,
        "modality_T": torch.randint(0, 2, [num_tokens], generator=generator),
        "request_id_T": torch.randint(0, 4, [num_tokens], generator=generator) * 1000 - 7,
        "layer_fraction": draw(st.sampled_from([0.0, 0.3, 1 / 3, 0.5, 2 / 3, 1.0])),
        "load_E": draw(st.sampled_from([None, torch.randint(0, 3, [num_experts], generator=generator)])),
        "seed": seed,
    }
