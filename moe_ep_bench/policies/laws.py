"""Laws that every routing policy keeps: ``check-policy`` tries them on scores of many kinds.

A law takes a ``Trial``: a policy, scores and the context's arguments. It raises ``LawBroken``, which says what was
expected. The tests of this package hold every policy of its own to the same laws.

Shapes: T = tokens, E = experts, K = top_k, R = ranks, S = rows of batch statistics.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from moe_ep_bench.errors import UserError
from moe_ep_bench.policies.contract import Policy, Routing, RoutingContext, check_routing
from moe_ep_bench.policies.lazy import Tensor, torch
from moe_ep_bench.policies.selection import top_k_map, weighted


class LawBroken(Exception):  # noqa: N818 - a finding, no error of ours
    """A law that a routing breaks, in one line."""


@dataclass(frozen=True, eq=False)
class Trial:
    """Scores to route, and what the policy may know besides.

    Attributes:
        scores_TE: float32 [T, E].
        router: what routes: the policy itself, or a compiled form of it.
        arguments: of ``RoutingContext``, but ``seed`` in place of its generator: every routing draws the same numbers.
    """

    policy: Policy
    scores_TE: Tensor
    arguments: Mapping[str, Any]
    router: Any

    def context(self, rows_T: Tensor | None = None, **changes: Any) -> RoutingContext:
        """The context of all tokens, or of those in ``rows_T``."""
        values = {**self.arguments, **changes}
        generator = torch.Generator().manual_seed(values.pop("seed", 0))
        if rows_T is not None:
            per_token = {key: value for key, value in values.items() if key.endswith("_T") and value is not None}
            values |= {key: value[rows_T] for key, value in per_token.items()}
        return RoutingContext(generator=generator, **values)

    def route(self, scores_TE: Tensor | None = None) -> Routing:
        return self.router.route(self.scores_TE if scores_TE is None else scores_TE, self.context())

    @property
    def title(self) -> str:
        (num_tokens, num_experts), arguments = self.scores_TE.shape, self.arguments
        shape = f"T={num_tokens} E={num_experts} K={arguments['top_k']} R={arguments['num_ranks']}"
        return f"{shape} seed={arguments['seed']}"


def law_types(trial: Trial, routing: Routing) -> None:
    """map_TE is bool and weights_TE float32, both [T, E]; weights are finite, at least 0, and 0 off the map"""
    try:
        check_routing(routing, trial.scores_TE)
    except UserError as error:
        raise LawBroken(str(error)) from None
    weights_TE = routing.weights_TE
    _require(bool(weights_TE.isfinite().all()), "weights_TE holds NaN or Inf")
    _require(bool((weights_TE >= 0).all()), "weights_TE holds a negative weight")
    _require(not bool(weights_TE[~routing.map_TE].any()), "weights_TE holds a weight where map_TE is False")


def law_bounds(trial: Trial, routing: Routing) -> None:
    """no token has more experts than most_experts promises, and no batch more pairs than most_pairs"""
    num_experts = trial.scores_TE.shape[1]
    most = trial.policy.most_experts(num_experts, trial.context())
    _require(1 <= most <= num_experts, f"most_experts: expected 1 to {num_experts}, got {most}")
    most_found = int(routing.map_TE.sum(dim=1).max()) if len(trial.scores_TE) else 0
    _require(most_found <= most, f"a token has {most_found} experts, most_experts says {most}")
    pairs, bound = (
        int(routing.map_TE.sum()),
        trial.policy.most_pairs(len(trial.scores_TE), num_experts, trial.context()),
    )
    _require(bound is None or pairs <= bound, f"there are {pairs} pairs, most_pairs says {bound}")


def law_pure(trial: Trial, routing: Routing) -> None:
    """the same inputs give the same bits; inputs and torch's global generator stay as they were"""
    given = {"scores_TE": trial.scores_TE, **trial.arguments}
    before = {key: value.clone() for key, value in given.items() if isinstance(value, torch.Tensor)}
    state = torch.get_rng_state()
    _require_same(trial.route(), routing, "a second routing")
    _require(torch.equal(torch.get_rng_state(), state), "torch's global generator moved")
    changed = [key for key, value in before.items() if not torch.equal(value, given[key])]
    _require(not changed, f"{', '.join(changed)} changed")


def law_padding(trial: Trial, routing: Routing) -> None:
    """padding selects nothing, and what it holds, or that it is there at all, changes nothing"""
    valid_T = trial.arguments.get("token_mask_T")
    if valid_T is None:
        return
    selects = bool(routing.map_TE[~valid_T].any()) or bool(routing.weights_TE[~valid_T].any())
    _require(not selects, "a padding token selects an expert")
    other_TE = torch.where(valid_T.unsqueeze(1), trial.scores_TE, 0.75)
    _require_same(trial.route(other_TE), routing, "with other scores in the padding, the routing")
    context = trial.context()
    generator = context.generator
    states = [generator.get_state()] if generator else []
    trial.router.route(trial.scores_TE, context)
    if generator and not torch.equal(generator.get_state(), *states):
        return  # Numbers are drawn for all rows, padding included.
    context = replace(trial.context(valid_T), token_mask_T=None)
    shorter = trial.router.route(trial.scores_TE[valid_T], context)
    _require_same(shorter, _rows(routing, valid_T), "without the padding, the routing")


def law_split(trial: Trial, routing: Routing) -> None:
    """batch_stats summed over parts of the batch give each part the routing that it has in the whole"""
    if trial.policy.batch_stats(trial.scores_TE, trial.context()) is None:
        return
    part_T = torch.arange(len(trial.scores_TE)) % 3
    if trial.arguments.get("request_id_T") is not None:  # A request lives on one rank.
        part_T = trial.arguments["request_id_T"] % 3
    parts = [part_T == part for part in range(4)]  # The last is a rank without tokens.
    of_parts = [trial.policy.batch_stats(trial.scores_TE[rows_T], trial.context(rows_T)) for rows_T in parts]
    stats = [part for part in of_parts if part is not None]
    _require(len(stats) == len(parts), "batch_stats: expected a tensor of every part of the batch, got None of one")
    kinds = {f"{part.dtype} {list(part.shape)}" for part in stats}
    expected = f"{torch.float64} {list(stats[0].shape)}"
    _require(kinds == {expected}, f"batch_stats: expected {expected} whatever the tokens, got {sorted(kinds)}")
    total_SE = torch.stack(stats).sum(dim=0)
    for rows_T in parts:
        part = trial.policy.route(trial.scores_TE[rows_T], trial.context(rows_T), total_SE)
        _require_same(part, _rows(routing, rows_T), "of a part of the batch, with everyone's statistics, the routing")


def law_layout(trial: Trial, routing: Routing) -> None:
    """neither the memory layout of the scores nor the sign of a zero changes anything"""
    strided_TE = trial.scores_TE.t().contiguous().t()
    _require_same(trial.route(strided_TE), routing, "of scores that lie column by column, the routing")
    negative_TE = torch.where(trial.scores_TE == 0, -0.0, trial.scores_TE)
    _require(torch.equal(trial.route(negative_TE).map_TE, routing.map_TE), "with -0 for 0, the routing differs")


def law_weights(trial: Trial, routing: Routing) -> None:
    """a token that keeps exactly the model's top-k has the model's weights: normalised, scaled, without the bias"""
    context = trial.context()
    top_k_TE = top_k_map(trial.scores_TE, context)
    model_TE = weighted(trial.scores_TE, top_k_TE, top_k_TE, context).weights_TE
    kept_T = (routing.map_TE == top_k_TE).all(dim=1) & top_k_TE.any(dim=1)
    wrong_TE = kept_T.unsqueeze(1) & ~torch.isclose(routing.weights_TE, model_TE, rtol=1e-4, atol=1e-6)
    if not wrong_TE.any():
        return
    token, expert = wrong_TE.nonzero()[0].tolist()
    weight, expected = float(routing.weights_TE[token, expert]), float(model_TE[token, expert])
    is_so = f"scale {context.scale:g}, normalize {context.normalize}, bias_E for the selection alone"
    raise LawBroken(f"a pair of a token that keeps its top-k weighs {weight:.4g}, the model's {expected:.4g} ({is_so})")


def law_looks(trial: Trial, routing: Routing) -> None:
    """scores past the model's top-k, which few recordings hold, decide nothing, or looks_past_top_k says so"""
    if trial.policy.looks_past_top_k:
        return
    top_k_TE, scores_TE = top_k_map(trial.scores_TE, trial.context()), trial.scores_TE
    other_TE = torch.where(top_k_TE, scores_TE, scores_TE.flip(1).minimum(scores_TE) / 2)
    is_same = torch.equal(trial.route(other_TE).map_TE, routing.map_TE)
    _require(is_same, "with other scores past the top-k, the routing has another map: declare looks_past_top_k = True")


Law = Callable[[Trial, Routing], None]
LAWS: tuple[Law, ...] = (law_types, law_bounds, law_pure, law_padding, law_split, law_layout, law_weights, law_looks)


def _require(condition: bool, broken: str) -> None:
    if not condition:
        raise LawBroken(broken)


def _require_same(routing: Routing, expected: Routing, what: str) -> None:
    """Bit for bit."""
    _require(torch.equal(routing.map_TE, expected.map_TE), f"{what} has another map")
    _require(torch.equal(routing.weights_TE, expected.weights_TE), f"{what} has other weights")


def _rows(routing: Routing, rows_T: Tensor) -> Routing:
    return Routing(routing.map_TE[rows_T], routing.weights_TE[rows_T])


# ---- trials --------------------------------------------------------------------------------------------------------

# Tokens, experts, ranks, top_k.
_SHAPES = [(0, 8, 1, 1), (1, 8, 8, 8), (5, 64, 4, 6), (1, 256, 8, 8), (40, 16, 4, 2), (33, 12, 3, 4), (300, 8, 2, 2)]
_KINDS = ("softmax", "sigmoid", "ties", "zero rows")


def trials(policy: Policy, count: int = 56) -> Iterator[Trial]:
    """Scores and contexts of every kind, always the same ones."""
    num_layers = next(iter(policy.layered.values()), None)
    for seed in range(count):
        num_tokens, num_experts, num_ranks, top_k = _SHAPES[seed % len(_SHAPES)]
        generator = torch.Generator().manual_seed(seed)

        def draw(high: int, *shape: int, generator: torch.Generator = generator) -> Tensor:
            return torch.randint(high, shape, generator=generator)

        logits_TE = torch.randn(num_tokens, num_experts, generator=generator)
        logits_TE += 1.5 * torch.randn(num_experts, generator=generator)  # Some experts are sought after.
        match _KINDS[seed % len(_KINDS)]:
            case "softmax":
                scores_TE = logits_TE.softmax(dim=1)
            case "sigmoid":
                scores_TE = logits_TE.sigmoid()
            case "ties":
                scores_TE = draw(4, num_tokens, num_experts) / 4
            case _:
                scores_TE = logits_TE.softmax(dim=1) * draw(2, num_tokens, 1)
        arguments = {
            "top_k": top_k,
            "num_ranks": num_ranks,
            "rank": seed % num_ranks,
            "normalize": seed % 2 == 1,
            "scale": (1.0, 2.5)[seed // 2 % 2],
            "bias_E": (draw(9, num_experts) - 4) / 4 if seed % 5 == 4 else None,
            "token_mask_T": draw(3, num_tokens) > 0 if seed % 3 else None,
            "request_id_T": draw(4, num_tokens),
            "modality_T": draw(2, num_tokens),
            "layer_fraction": seed % num_layers / num_layers if num_layers else seed % 4 / 3,
            "load_E": draw(3, num_experts) if seed % 4 == 3 else None,
            "seed": seed,
        }
        yield Trial(policy, scores_TE, arguments, policy)


def check_text(policy: Policy, label: str) -> tuple[str, bool]:
    """Hold a policy to all laws: what ``check-policy`` prints of it, under its label, and whether all were kept.

    Raises:
        ValueError: the policy's own checks refuse every trial.
    """
    broken: dict[Law, str] = {}  # by the first trial
    held: set[Law] = set()  # with tokens
    tried, refused = 0, []
    for trial in trials(policy):
        try:
            policy.check(trial.scores_TE, trial.context())
        except ValueError as error:
            refused.append(f"{trial.title}: {error}")
            continue
        tried += 1
        law = law_types
        try:
            routing = trial.route()
            for law in LAWS:
                law(trial, routing)
                held |= {law} if trial.scores_TE.numel() else set()
        except LawBroken as error:
            broken.setdefault(law, f"{trial.title}: {error}")
        except Exception as error:  # of the policy
            at = traceback.extract_tb(error.__traceback__)[-1]
            told = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            broken.setdefault(law, f"{trial.title}: {told} ({at.filename.rpartition('/')[2]}, line {at.lineno})")
    if not tried:
        raise UserError(f"{label}: refuses all trials: {refused[0]}")
    lines = [f"{label}: {tried} trials" + (f", {len(refused)} refused ({refused[0]})" if refused else "")]
    for law in LAWS:
        lines.append(f"  {'BROKEN' if law in broken else 'kept' if law in held else 'not tried'}: {law.__doc__}")
        lines += [f"    {broken[law]}"] if law in broken else []
    return "\n".join(lines), not broken
