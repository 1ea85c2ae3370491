"""A measured decode run's cost model, as figures for a file of data/devices/.

OEA's cost model (arXiv 2511.02237, section 2) is time = base + b x activated experts + a x pairs. All points of a layer
(``activated.decode_steps``) are fitted at once. The term for pairs is kept where its interval lies above 0; else it
is none, and base and b are those of the straight line over activated experts: steps of one number of tokens, under
policies that drop nothing, have as many pairs whatever they activate, and cannot tell a from the base.

What is printed is YAML that goes under ``decode`` of the device's file. Intervals take the points as independent;
those of one batch under several policies are not, so that they are narrower than the truth. What was scaled down is
no device's figure, and is printed as a comment.
"""

from __future__ import annotations

import json
from typing import Any

from moe_ep_bench.analysis.activated import Steps, decode_steps
from moe_ep_bench.analysis.load import ResultsError, Run
from moe_ep_bench.models import ModelSpec


def fit_text(run: Run, preset: str | None = None) -> str:
    """YAML for ``decode`` of a device's file: an entry for each layer of the run.

    Args:
        preset: of data/models/; only its layers, where the run has others too.

    Raises:
        ResultsError: nothing of the run can be fitted; one line that says why.
        ValueError: there is no such preset.
    """
    if all(one.device is not None for one in run.comparisons.values()):
        raise ResultsError(f"{run.directory}: its times are modelled; expected ones that were measured")
    pools = decode_steps(run)
    if not pools:
        raise ResultsError(
            f"{run.directory}: expected a decode run: steps that leave experts idle, timed by phase"
            " (measure.breakdown_iterations above 0) and not modelled; see configs/decode.yaml"
        )
    if preset is not None:
        wanted = ModelSpec.named(preset).name
        there = list(dict.fromkeys(steps.comparisons[0].model for steps in pools))
        # A shard's name begins with its model's.
        pools = [steps for steps in pools if steps.comparisons[0].model.split(", ")[0] == wanted]
        if not pools:
            raise ResultsError(f"{run.directory}: --preset {preset}: expected a model of {', '.join(there)}")
    entries = [_entry(run, steps) for steps in pools]
    key = "decode:" if any(is_figure for is_figure, _ in entries) else "# decode:"
    return "\n".join([f"# {run.device_name}, by `moe-ep-bench calibrate --from`", key, *(text for _, text in entries)])


def _entry(run: Run, steps: Steps) -> tuple[bool, str]:
    """Whether it is a figure for a device's file, and its YAML, as a comment where it is none."""
    facts, fit = steps.comparisons[0], _fit(steps)
    if fit is None:
        return False, f"  # {steps.title}: no line can be fitted to {len(steps.points)} points"
    tokens = sorted({one.num_tokens for one in steps.comparisons})
    versions = (("torch", run.torch), ("megatron-core", run.megatron_core))
    known = [f"{name} {version}" for name, version in versions if version is not None]
    lines = [
        f"# {steps.title}; {len(steps.points)} points; [95 % intervals] take them as independent",
        f"- experts: {facts.experts.ran}",
        f"  model: {json.dumps(facts.model, ensure_ascii=False)}",
        f"  hidden_size: {facts.hidden_size}",
        f"  ffn_hidden_size: {facts.slice_size}",
        f"  dtype: {facts.dtype}",
        *(
            f"  {name}: {'null' if value is None else f'{value:.4g}'}  # {words}"
            for name, (value, words) in fit.items()
        ),
        f"  r2: {(steps.line if fit['per_pair_us'][0] is None else steps.cost).r2:.4f}",
        f"  tokens: [{', '.join(map(str, tokens))}]",
        "  basis: measured",
        f"  source: {json.dumps(', '.join([run.device_name, *known, f'run {run.run_id}']), ensure_ascii=False)}",
    ]
    problems = {
        f"sizes x {facts.scale:g} of the true ones, which no model has": facts.scale != 1,
        "more ranks than cores: they shared time slices": any(one.oversubscribed for one in steps.comparisons),
        "an activated expert more takes no longer": fit["per_expert_us"][0] <= 0,
        "the base is below 0: time is no straight line here": fit["base_us"][0] < 0,
    }
    found = [words for words, is_so in problems.items() if is_so]
    if found:
        lines = [f"not a device's figure: {'; '.join(found)}", *lines]
        return False, "\n".join(f"  # {line.removeprefix('# ')}" for line in lines)
    return True, "\n".join(f"  {line}" for line in lines)


def _fit(steps: Steps) -> dict[str, Any] | None:
    """Base, time per expert and per pair in microseconds, each with its interval in words; None without a line."""
    cost, line = steps.cost, steps.line
    names = ("base_us", "per_expert_us", "per_pair_us")
    if cost is not None and cost.intervals_us[2][0] > 0:
        values = cost.intercept_us, cost.per_expert_us, cost.per_pair_us
        return dict(zip(names, zip(values, map(_interval, cost.intervals_us), strict=True), strict=True))
    if line is None:
        return None
    why = "not fitted: pairs do not vary on their own"
    if cost is not None:
        why = f"{cost.per_pair_us:.3g} {_interval(cost.intervals_us[2])} us: not above 0"
    return {
        "base_us": (line.intercept_us, _interval((line.intercept_low_us, line.intercept_high_us))),
        "per_expert_us": (line.slope_us, _interval((line.slope_low_us, line.slope_high_us))),
        "per_pair_us": (None, why),
    }


def _interval(ends: tuple[float, float]) -> str:
    return f"[{ends[0]:.4g}, {ends[1]:.4g}]"
