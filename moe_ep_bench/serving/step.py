"""Route the tokens of one step of a server by a policy, in the K slots a token that its kernels have; and record steps.

The server's own router goes first. What it chose stays, to the bit, wherever the policy leaves a token its own top-k:
a router in bfloat16 ties (its ``torch.topk`` breaks ties as it likes) and rounds its weights, and neither is a policy's
doing. Elsewhere the policy's experts and weights take the slots. A token with fewer experts than slots repeats one that
it holds, at weight 0; one that lost all repeats the busiest expert of the step: no expert is read that was not read
anyway. The kernel still computes such a slot.

Shapes: T = tokens of a step, E = experts, K = top_k, L = MoE layers.
"""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moe_ep_bench.errors import UserError
from moe_ep_bench.layer.experts import seeded_generator
from moe_ep_bench.models import ModelSpec, shares
from moe_ep_bench.policies import Policy, Routing
from moe_ep_bench.quality.checkpoint import Choice, MoELayer
from moe_ep_bench.quality.routed import PolicyRouter
from moe_ep_bench.workload.trace import written_trace

# Arguments of vLLM's router factory that make scores unknown to policies, and their names in messages.
_UNKNOWN_ROUTERS = {
    "custom_routing_function": "a routing function of the model's own",
    "zero_expert_type": "experts that compute nothing",
    "hash_indices_table": "experts by token id",
    "bias_vl": "a selection bias for images",
    "num_fused_shared_experts": "shared experts fused into the routed ones",
}
COUNTS = ("steps", "tokens", "pairs", "dropped", "rerouted", "own_mass", "mass", "own_activated", "activated")


def moe_layer(name: str, number: int, fraction: float, num_experts: int, top_k: int, **told: Any) -> MoELayer:
    """A layer as policies know it, from the arguments of vLLM's router factory.

    Raises:
        ValueError: a router whose scores are none that a policy knows.
    """
    for key, words in _UNKNOWN_ROUTERS.items():
        if not (told.get(key) is None or (isinstance(told[key], int) and told[key] == 0)):
            raise UserError(f"{name}: {words} ({key}), which no policy knows")
    score_function = told.get("scoring_func", "softmax")
    if score_function not in ("softmax", "sigmoid"):
        raise UserError(f"{name}: scoring_func: expected softmax or sigmoid, got {score_function!r}")
    bias, scale = told.get("e_score_correction_bias"), told.get("routed_scaling_factor", 1.0)
    groups, top = told.get("num_expert_group"), told.get("topk_group")
    has_groups = bool(told.get("use_grouped_topk")) and groups is not None and groups > 1
    spec = ModelSpec(
        name=name,
        source="vLLM",
        num_layers=number + 1,
        hidden_size=1,
        ffn_hidden_size=1,
        num_experts=num_experts,
        top_k=top_k,
        score_function=score_function,
        normalize=bool(told.get("renormalize", True)),
        selection_bias=bias is not None,
        num_groups=groups if has_groups else None,
        top_groups=top if has_groups else None,
        group_score_experts=(2 if bias is not None else 1) if has_groups else None,
        routed_scale=scale,
    )
    # The parameter itself: weights are loaded into it later.
    router = SimpleNamespace(routed_scaling_factor=scale, e_score_correction_bias=bias)
    return MoELayer(name, number, fraction, router, None, spec)


@dataclass(frozen=True, eq=False)
class Step:
    """The tokens that a server computes together, request by request.

    Attributes:
        request_T: which of the step's requests each is of, int64 on the scores' device.
        is_prompt_T: whether it is a prompt's (prefill) or was generated (decode), bool.
    """

    request_T: Tensor
    is_prompt_T: Tensor

    def acting(self, acts_in: Sequence[str]) -> Tensor:
        """Which tokens a policy decides on that acts in these phases: bool [T]."""
        return (self.is_prompt_T & ("prefill" in acts_in)) | (~self.is_prompt_T & ("decode" in acts_in))


class StepRouter:
    """Routes the MoE layers of a model by one policy, and counts what it did.

    Args:
        num_ranks: expert-parallel ranks; a step is one batch of all of them.
        acts_in: phases whose tokens the policy decides on, prefill, decode or both; None = its own.
    """

    def __init__(
        self,
        policy: Policy,
        layers: Sequence[MoELayer],
        num_ranks: int,
        device: torch.device | str,
        acts_in: Sequence[str] | None = None,
    ) -> None:
        self.layers, self.num_ranks = layers, num_ranks
        self.acts_in = policy.acts_in if acts_in is None else acts_in
        self.router = PolicyRouter(policy)
        self.generator = seeded_generator(torch.device(device), 0)
        self.counts_LC = torch.zeros(len(layers), len(COUNTS), dtype=torch.float64, device=device)

    def route(
        self, place: int, choice: Choice, weights_TK: Tensor, ids_TK: Tensor, step: Step
    ) -> tuple[Tensor, Tensor]:
        """Weights and expert ids [T, K] of a layer, in the types of the router's own."""
        layer, (scores_TE, own_TE) = self.layers[place], choice
        acts_T = step.acting(self.acts_in)
        context = replace(
            layer.context(self.num_ranks),
            token_mask_T=None if bool(acts_T.all()) else acts_T,
            request_id_T=step.request_T,
            generator=self.generator,
        )
        (routing,) = self.router.route(layer, [scores_TE], [context])
        map_TE = torch.where(acts_T.unsqueeze(1), routing.map_TE, own_TE)
        self._count(place, scores_TE, own_TE, map_TE, acts_T)
        is_topk_T = (map_TE == own_TE).all(dim=1)  # which has the model's weights, by ``laws.law_weights``
        return into_slots(Routing(map_TE, routing.weights_TE), ~acts_T | is_topk_T, weights_TK, ids_TK)

    def _count(self, place: int, scores_TE: Tensor, own_TE: Tensor, map_TE: Tensor, acts_T: Tensor) -> None:
        acting_T1 = acts_T.unsqueeze(1)
        missing_T, added_T = (own_TE & ~map_TE).sum(dim=1), (map_TE & ~own_TE).sum(dim=1)
        rerouted_T = torch.minimum(missing_T, added_T)
        self.counts_LC[place] += torch.stack(
            [
                acts_T.any(),
                acts_T.sum(),
                (own_TE & acting_T1).sum(),
                (missing_T - rerouted_T).sum(),
                rerouted_T.sum(),
                (scores_TE * (own_TE & acting_T1)).sum(dtype=torch.float64),
                (scores_TE * (map_TE & acting_T1)).sum(dtype=torch.float64),
                own_TE.any(dim=0).sum() * acts_T.any(),
                map_TE.any(dim=0).sum() * acts_T.any(),
            ]
        ).to(self.counts_LC)

    def report(self) -> str:
        """Counts of the policy so far, over all layers."""
        count = dict(zip(COUNTS, self.counts_LC.sum(dim=0).tolist(), strict=True))
        # Tokens and steps pass through every layer.
        tokens, steps = (count[name] / len(self.layers) for name in ("tokens", "steps"))
        pairs, steps_of_all = max(count["pairs"], 1), max(count["steps"], 1)
        return (
            f"all layers: {tokens:,.0f} tokens, {count['dropped']:,.0f} of {count['pairs']:,.0f} top-k pairs dropped "
            f"({count['dropped'] / pairs:.2%}), {count['rerouted']:,.0f} rerouted ({count['rerouted'] / pairs:.2%}), "
            f"{count['mass'] / (count['own_mass'] or 1):.4f} of the top-k's mass kept, "
            f"{count['activated'] / steps_of_all:.1f} experts activated a layer and step "
            f"({count['own_activated'] / steps_of_all:.1f} by top-k) in {steps:,.0f} steps"
        )


def into_slots(routing: Routing, keeps_T: Tensor, weights_TK: Tensor, ids_TK: Tensor) -> tuple[Tensor, Tensor]:
    """A policy's routing in the slots of a server: weights and ids [T, K].

    Args:
        routing: of all tokens; those that keep what they have need no weights.
        keeps_T: tokens whose slots stay as the server's router filled them.
        weights_TK, ids_TK: how it filled them.

    Raises:
        ValueError: the policy gave a token more experts than there are slots.
    """
    top_k, map_TE = ids_TK.shape[1], routing.map_TE
    if not len(ids_TK):
        return weights_TK.clone(), ids_TK.clone()
    held_T = map_TE.sum(dim=1)
    if (most := int(held_T.max())) > top_k:
        raise UserError(
            f"expected at most {top_k} experts a token, the slots of vLLM's kernels; the policy gave {most}"
        )
    found_TK, expert_TK = routing.weights_TE.masked_fill(~map_TE, -1.0).topk(top_k, dim=1)
    empty_TK = found_TK < 0
    stand_in_T1 = torch.where(held_T.unsqueeze(1) > 0, expert_TK[:, :1], map_TE.sum(dim=0).argmax())
    expert_TK, found_TK = torch.where(empty_TK, stand_in_T1, expert_TK), found_TK.clamp(min=0)
    keeps_T1 = keeps_T.unsqueeze(1)
    return (
        torch.where(keeps_T1, weights_TK, found_TK.to(weights_TK)),
        torch.where(keeps_T1, ids_TK, expert_TK.to(ids_TK)),
    )


@dataclass(eq=False)
class Recorder:
    """Records what a server's routers choose: ``moe-trace-v1`` files with the scores of all experts.

    Steps wait in memory until the server stops or the limit is reached. Then prompts and generated tokens are written
    each to a file of their own, ``prefill.safetensors`` and ``decode.safetensors``. A server that is killed loses them.

    Attributes:
        directory: of the files.
        facts: metadata of both files: model and source.
        notes: what a user of them should know.
        most_bytes: held in memory; then recording ends.
        say: receives a line for each file, and at the end.
        clock: seconds, from any start; a request's time is that of the first step that serves it.
    """

    directory: Path
    layers: Sequence[MoELayer]
    facts: dict[str, str]
    notes: Sequence[str]
    most_bytes: float
    say: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self.is_open = True
        self._num_bytes = 0
        self._began_s = self.clock()
        self._arrival_s: list[float] = []  # by sequence
        self._requests: defaultdict[str, int] = defaultdict(itertools.count().__next__)
        self._step: dict[int, tuple[NDArray[np.float32], NDArray[np.integer]]] = {}
        self._steps: list[tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_], Any]] = []

    def add(self, place: int, choice: Choice, ids_TK: Tensor) -> None:
        """Add what a layer, the layers' ``place``, chose in the step."""
        self._step[place] = shares(choice.scores_TE).cpu().numpy(), ids_TK.cpu().numpy()

    def forget(self, names: Iterable[str]) -> None:
        """Requests that ended: who has such a name from now on is another."""
        for name in names:
            self._requests.pop(name, None)

    def end_step(self, request_T: Sequence[str], position_T: NDArray[np.int64], is_prompt_T: NDArray[np.bool_]) -> None:
        """Complete a step; ``request_T`` has the server's names of the requests."""
        step, self._step = self._step, {}
        if not self.is_open:
            return
        sequence_T = np.array([self._requests[name] for name in request_T], np.int64)
        now_s = self.clock() - self._began_s
        self._arrival_s += [now_s] * (int(sequence_T.max(initial=-1)) + 1 - len(self._arrival_s))  # of new ones
        self._steps.append((sequence_T, position_T, is_prompt_T, step))
        self._num_bytes += sum(full_TE.nbytes + ids_TK.nbytes for full_TE, ids_TK in step.values())
        if self._num_bytes >= self.most_bytes:
            self.close()
            self.say(f"recording ended at its limit of {self.most_bytes / 2**30:.3g} GiB; serving goes on")

    def close(self) -> None:
        """Write what was recorded, once; what cannot be written is lost, not the server."""
        if self.is_open:
            try:
                for phase in ("prefill", "decode"):
                    self._write(phase)
            except (OSError, ValueError) as problem:
                self.say(f"recording lost: {problem}")
        self.is_open, self._steps = False, []

    def _write(self, phase: str) -> None:
        asked = [is_prompt_T == (phase == "prefill") for _, _, is_prompt_T, _ in self._steps]
        if not any(is_asked_T.any() for is_asked_T in asked):
            return
        path = self.directory / f"{phase}.safetensors"
        with written_trace(path, self.directory) as writer:
            self.layers[0].describe(writer, phase=phase, domain="requests of a server", **self.facts)
            writer.notes += self.notes
            for sequence, seconds in enumerate(self._arrival_s):
                writer.add_arrival(sequence, seconds)
            for kept_T, (sequence_T, position_T, _, step) in zip(asked, self._steps, strict=True):
                for place, (full_TE, ids_TK) in step.items():
                    writer.add(self.layers[place].number, ids_TK[kept_T], None, phase, full_TE=full_TE[kept_T])
                writer.add_tokens(sequence_T[kept_T], position_T[kept_T], phase)
        self.say(f"wrote {path}: {writer.num_tokens:,} tokens")
