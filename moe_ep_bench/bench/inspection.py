"""Look at cases before and after they are timed: what their layers chose and computed, held against the reference.

Every case routes alone first, then runs once on every batch: kernels compile, every shape is seen, routing metrics are
taken, and each layer's output is held against the dense reference for the input that it got. What raises where ranks do
not meet, and what is wrong, costs the case and no rank: all agree on it (``drop_failing``).

Shapes: T = this rank's tokens, E = experts, N = tokens held against the reference, V = cases.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from moe_ep_bench.bench.comparison import BALANCED, BASELINE
from moe_ep_bench.bench.routing import case_metrics
from moe_ep_bench.bench.session import Case, Session
from moe_ep_bench.kernels import oracle_for
from moe_ep_bench.layer.components import DecodeExperts
from moe_ep_bench.layer.experts import TOLERANCE
from moe_ep_bench.policies import Routing
from moe_ep_bench.runtime.attempts import split_reason

NUM_CHECKED_TOKENS = 16


class LayerLook(NamedTuple):
    """What was seen of one MoE layer in an untimed run."""

    routing: Routing
    gated_TE: Tensor
    """The gate's own logits, which the workload's scores replace."""
    input_ND: Tensor
    output_ND: Tensor


class Observation(NamedTuple):
    """One untimed run of a case on a batch."""

    output: Tensor
    layers: dict[int | None, LayerLook]

    @property
    def problem(self) -> str:
        """What of it is no number; empty where all is well."""
        for layer, seen in self.layers.items():
            where = "" if layer is None else f", layer {layer}"
            parts = {"the gate's logits": seen.gated_TE, "routing weights": seen.routing.weights_TE}
            for what, values in {**parts, "output": seen.output_ND}.items():
                if not bool(values.isfinite().all()):
                    return f"NaN or Inf in {what}{where}"
        whole = "output" if None in self.layers else "the logits"
        return "" if bool(self.output.isfinite().all()) else f"NaN or Inf in {whole}"


def look(case: Case, batch: int) -> Observation:
    """Run a case once, untimed, and look at what its MoE layers were given, chose and returned."""
    inputs, session = case.prepare(batch), case.session
    rows_N, clock = checked_rows(session, batch), session.watch.recorder.clock
    seen: dict[int | None, dict[str, Any]] = defaultdict(dict)

    def note_routing(layer: int | None, module: Any, inputs: Any, output: tuple[Tensor, Tensor]) -> None:
        seen[layer]["routing"] = Routing(map_TE=output[1], weights_TE=output[0])

    def note_ends(layer: int | None, module: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Any]) -> None:
        ends = {"input_ND": inputs[0], "output_ND": output[0]}
        seen[layer].update({name: hidden.flatten(0, 1)[rows_N].clone() for name, hidden in ends.items()})

    with contextlib.ExitStack() as hooks:
        for layer, moe in session.stack.moe_layers.items():
            hooks.callback(moe.router.register_forward_hook(partial(note_routing, layer)).remove)
            hooks.callback(moe.register_forward_hook(partial(note_ends, layer)).remove)
            moe.router.look = partial(seen[layer].__setitem__, "gated_TE")
            hooks.callback(setattr, moe.router, "look", None)
        with clock.watched(), clock.unseen() as places:
            output = session.stack.run(inputs)
    case.unclocked = sorted(set(places))
    return Observation(output, {layer: LayerLook(**parts) for layer, parts in seen.items()})


def look_replayed(case: Case, batch: int, eager: Observation) -> Observation:
    """Replay a batch and hold it against an eager run; what can be seen of it: of a model only the latter."""
    session = case.session
    assert session.captured is not None
    run = session.captured[case.case_id, batch, False]
    run.replay()
    assert run.output is not None
    output, routed = run.output.clone(), {}
    for layer, (weights_TE, map_TE) in run.routing.items():
        routed[layer] = Routing(map_TE=map_TE.clone(), weights_TE=weights_TE.clone())
    gap, size = (float(x.float().norm()) for x in (output - eager.output, eager.output))
    problem = ""
    if not all(torch.equal(seen.routing.map_TE, routed[layer].map_TE) for layer, seen in eager.layers.items()):
        problem = f"it routes batch {batch} otherwise"
    elif not gap <= TOLERANCE[session.dtype] * size:
        problem = f"its output on batch {batch} is off by {gap:.2g} of {size:.2g}"
    case.problem = case.problem or (problem and f"failed: replayed from a CUDA graph, {problem}")
    if None not in routed:
        return eager
    output_ND = output.flatten(0, 1)[checked_rows(session, batch)]
    return Observation(output, {None: eager.layers[None]._replace(routing=routed[None], output_ND=output_ND)})


def checked_rows(session: Session, batch: int) -> Tensor:
    """Indices of this rank's tokens that are held against the dense reference: int64 [N]."""
    num_tokens = session.shares[batch][session.layers[0]].num_tokens
    places_N = torch.linspace(0, max(num_tokens - 1, 0), min(NUM_CHECKED_TOKENS, num_tokens))
    return places_N.long().to(session.device)


@contextlib.contextmanager
def _without_others(case: Case) -> Iterator[None]:
    """Let what is raised in the block, in which ranks do not meet, be the case's problem: ranks stay together."""
    try:
        yield
    except Exception as error:
        case.problem = case.problem or case.session.job.record_failure(error)


def try_all(session: Session) -> None:
    """Route every batch by every case: kernels compile, and what raises does so while no rank waits for another.

    The statistics of a policy that looks at the whole batch are this rank's own.
    """
    for case in session.cases:
        session.job.guard.at(case.case_id)
        with _without_others(case):
            for batch in range(session.num_batches):
                session.job.guard.feed()
                case.route_alone(batch)


def observe_all(session: Session) -> None:
    """Run every case on every batch once: shapes are seen, routing metrics taken, every layer's output checked."""
    job = session.job
    for batch in range(session.num_batches):
        native: Tensor | None = None
        for case in session.cases:
            job.begin(case.case_id)
            if case.spec.role == BASELINE and batch == 0:  # Where it is lost, no case of this size can be had.
                job.guard.at(session.comparison.comparison_id)
            seen = look(case, batch)
            if case.spec.role == BASELINE:
                native = seen.output
            with _without_others(case):
                _note(case, seen, batch)
                for layer, of_layer in seen.layers.items():
                    job.guard.feed()
                    share = case.share(batch, layer)
                    row = case_metrics(case.spec, of_layer.routing, share, session.comparison.ranks_per_node)
                    row["reference_error"] = _reference_error(case, layer, of_layer) if batch == 0 else None
                    is_last = layer == session.layers[-1] and case.spec.role != BALANCED and native is not None
                    valid_T = share.context.token_mask_T
                    row["output_error"] = relative_error(seen.output, native, valid_T) if is_last else None
                    case.rows[batch, layer] = row


def check_again(session: Session) -> None:
    """Hold every layer of every case against the reference once more, replayed where it is to be timed so."""
    for case in session.cases:
        session.job.begin(case.case_id)
        seen = look(case, 0)
        with _without_others(case):
            _note(case, seen, 0)
        if session.captured is not None:
            seen = look_replayed(case, 0, seen)
        with _without_others(case):
            for layer, of_layer in seen.layers.items():
                session.job.guard.feed()
                row = case.rows[0, layer]
                row["reference_error"] = worse(_reference_error(case, layer, of_layer), row["reference_error"])


def _note(case: Case, seen: Observation, batch: int) -> None:
    """Note what is no number. The reference is held against few tokens of one batch; this is found in all."""
    if seen.problem:
        case.problem = case.problem or f"{seen.problem}, batch {batch}"


def _reference_error(case: Case, layer: int | None, seen: LayerLook) -> float:
    """Compare a layer's run on batch 0 with the dense reference; a policy's map also with the policy itself.

    Not so the map of a policy whose statistics are summed over other ranks.
    """
    session, policy, share = case.session, case.spec.policy, case.share(0, layer)
    weights_NE = seen.routing.weights_TE[checked_rows(session, 0)]
    error = session.reference(layer, seen.input_ND).worst_error(seen.output_ND, weights_NE)
    alone, context = session.comparison.ep_size == 1, case.router.context(share)
    if policy is not None and (alone or policy.batch_stats(share.scores_TE, context) is None):
        expected = oracle_for(policy, session.device).route(share.scores_TE, case.router.context(share))
        if not torch.equal(expected.map_TE, seen.routing.map_TE):
            error = float("inf")
    case.error = worse(error, case.error)
    return error


def worse(error: float, other: float) -> float:
    """The larger of two errors, and NaN where one is: Python's ``max`` would lose a second one that is NaN."""
    return float(np.maximum(error, other))


def drop_failing(session: Session, when: str) -> None:
    """Record cases whose output is wrong on any rank as failed, and go on without them."""
    tolerance = TOLERANCE[session.dtype]
    of_ranks = session.job.ranks.all_gather([(case.problem, case.error) for case in session.cases])
    for case, found_R in zip(list(session.cases), zip(*of_ranks, strict=True), strict=True):
        problem_R, error_R = zip(*found_R, strict=True)
        if any(problem_R):
            rank, reason = next((rank, problem) for rank, problem in enumerate(problem_R) if problem)
            status, words = split_reason(reason)
            session.drop(case, status, f"{when}: rank {rank}: {words}")
        elif not all(error <= tolerance for error in error_R):
            what = f"output differs from the dense reference by {np.max(error_R):.2g}, allowed is {tolerance:g}"
            session.drop(case, "failed", f"{when}: {what}")


def compute_alone(session: Session) -> None:
    """Compute a token by each local expert of the first MoE layer: experts' kernels compile."""
    experts, model = next(iter(session.stack.moe_layers.values())).experts, session.comparison.model
    num_local = model.num_experts // session.stack.ep_group.size()
    hidden_ND = torch.zeros(num_local, model.hidden_size, dtype=session.dtype, device=session.device)
    if isinstance(experts, DecodeExperts):
        map_NL = torch.eye(num_local, dtype=torch.bool, device=session.device)
        experts(hidden_ND, map_NL, map_NL.float())
    else:
        counts_L = torch.ones(num_local, dtype=torch.int64)
        experts(hidden_ND, counts_L, torch.ones(num_local, device=session.device))


def relative_error(output_TD: Tensor, native_TD: Tensor, valid_T: Tensor | None) -> float:
    """|output - native| / |native| over valid tokens; None = all are."""
    if valid_T is not None:
        output_TD, native_TD = output_TD[valid_T], native_TD[valid_T]
    size = float(native_TD.float().norm())
    return float((output_TD.float() - native_TD.float()).norm()) / size if size else 0.0
