"""Look at one untimed run of a case: what its MoE layers got, chose and computed.

Shapes: T = this rank's tokens, E = experts, N = tokens held against the reference.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from moe_ep_bench.bench.layer_runner import LayerRunner
from moe_ep_bench.bench.measure import Case
from moe_ep_bench.layer.graphs import CapturedRun
from moe_ep_bench.policies import Routing


class LayerLook(NamedTuple):
    """What was seen of one MoE layer in an untimed run; ``gated_TE``: the gate's own logits, which scores replace."""

    routing: Routing
    gated_TE: Tensor
    input_ND: Tensor
    output_ND: Tensor


class Look(NamedTuple):
    """One untimed run of a case on a batch."""

    output: Tensor
    layers: dict[int | None, LayerLook]

    @property
    def problem(self) -> str:
        """Where there is NaN or Inf, in words; empty if nowhere."""
        for layer, seen in self.layers.items():
            where = "" if layer is None else f", layer {layer}"
            parts = {"the gate's logits": seen.gated_TE, "routing weights": seen.routing.weights_TE}
            for what, values in {**parts, "output": seen.output_ND}.items():
                if not bool(values.isfinite().all()):
                    return f"NaN or Inf in {what}{where}"
        whole = "output" if None in self.layers else "the logits"
        return "" if bool(self.output.isfinite().all()) else f"NaN or Inf in {whole}"


def look(runner: LayerRunner, case: Case, batch: int, rows_N: Tensor) -> Look:
    """Run a case once, untimed, and look at what its MoE layers were given, chose and returned.

    Args:
        rows_N: indices of the tokens whose hidden states are kept.
    """
    inputs, clock = runner.prepare(case, batch), runner.watch.recorder.clock
    seen: dict[int | None, dict[str, Any]] = defaultdict(dict)

    def note_routing(layer: int | None, module: Any, inputs: Any, output: tuple[Tensor, Tensor]) -> None:
        seen[layer]["routing"] = Routing(map_TE=output[1], weights_TE=output[0])

    def note_ends(layer: int | None, module: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Any]) -> None:
        ends = {"input_ND": inputs[0], "output_ND": output[0]}
        seen[layer].update({name: hidden.flatten(0, 1)[rows_N].clone() for name, hidden in ends.items()})

    with contextlib.ExitStack() as hooks:
        for layer, moe in runner.stack.moe_layers.items():
            hooks.callback(moe.router.register_forward_hook(partial(note_routing, layer)).remove)
            hooks.callback(moe.register_forward_hook(partial(note_ends, layer)).remove)
            moe.router.look = partial(seen[layer].__setitem__, "gated_TE")
            hooks.callback(setattr, moe.router, "look", None)
        with clock.watched(), clock.unseen() as places:
            output = runner.stack.run(inputs)
    case.unclocked = sorted(set(places))
    return Look(output, {layer: LayerLook(**parts) for layer, parts in seen.items()})


def look_replayed(run: CapturedRun, eager: Look, rows_N: Tensor, tolerance: float) -> tuple[Look, str]:
    """Replay a run from its CUDA graph, and compare it with an eager one.

    Returns:
        What the replay chose and computed (of a model, whose graph keeps its logits alone, the eager run); and how it
        differs, in words, empty where it does not.
    """
    run.replay()
    assert run.output is not None
    output = run.output.clone()
    routed = {
        layer: Routing(map_TE=map_TE.clone(), weights_TE=weights_TE.clone())
        for layer, (weights_TE, map_TE) in run.routing.items()
    }
    differs = _difference(eager, output, routed, tolerance)
    if None not in routed:
        return eager, differs
    output_ND = output.flatten(0, 1)[rows_N]
    return Look(output, {None: eager.layers[None]._replace(routing=routed[None], output_ND=output_ND)}), differs


def _difference(eager: Look, output: Tensor, routed: dict[int | None, Routing], tolerance: float) -> str:
    """How a replay differs from an eager run; empty where it does not."""
    if not all(torch.equal(seen.routing.map_TE, routed[layer].map_TE) for layer, seen in eager.layers.items()):
        return "it routes otherwise"
    gap, size = (float(values.float().norm()) for values in (output - eager.output, eager.output))
    return "" if gap <= tolerance * size else f"its output is off by {gap:.2g} of {size:.2g}"


def worse(error: float, other: float) -> float:
    """The larger of two errors, and NaN where one is: Python's ``max`` would lose a second one that is NaN."""
    return float(np.maximum(error, other))


def relative_error(output_TD: Tensor, native_TD: Tensor, valid_T: Tensor | None) -> float:
    """|output - native| / |native| over valid tokens; None = all are."""
    if valid_T is not None:
        output_TD, native_TD = output_TD[valid_T], native_TD[valid_T]
    size = float(native_TD.float().norm())
    return float((output_TD.float() - native_TD.float()).norm()) / size if size else 0.0
