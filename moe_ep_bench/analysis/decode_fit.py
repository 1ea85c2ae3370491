"""A measured decode run's cost model, as figures for a file of configs/devices/.

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
from collections.abc import Sequence
from dataclasses import dataclass

from moe_ep_bench.analysis.activated import Steps, decode_steps
from moe_ep_bench.analysis.load import ResultsError, Run
from moe_ep_bench.models import ModelSpec

Interval = tuple[float, float]


@dataclass(frozen=True)
class _Model:
    """Base, b and a in microseconds with their 95 % intervals; a of which nothing is known has neither."""

    base_us: float
    base_interval_us: Interval
    per_expert_us: float
    per_expert_interval_us: Interval
    per_pair_us: float | None
    per_pair_words: str
    r2: float


def fit_text(run: Run, preset: str | None = None) -> str:
    """YAML for ``decode`` of a device's file: an entry for each layer of the run.

    Args:
        preset: of configs/models/; only its layers, where the run has others too.

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
    facts, model = steps.comparisons[0], _model(steps)
    tokens = sorted({one.num_tokens for one in steps.comparisons})
    if model is None:
        return False, _as_comment([f"{steps.title}: no line can be fitted to {len(steps.points)} points"])
    title = f"# {steps.title}; {len(steps.points)} points; [95 % intervals] take them as independent"
    per_pair = "null" if model.per_pair_us is None else f"{model.per_pair_us:.4g}"
    lines = [
        f"- experts: {facts.experts.ran}",
        f"  model: {json.dumps(facts.model, ensure_ascii=False)}",
        f"  hidden_size: {facts.hidden_size}",
        f"  ffn_hidden_size: {facts.slice_size}",
        f"  dtype: {facts.dtype}",
        f"  base_us: {model.base_us:.4g}  # {_interval(model.base_interval_us)}",
        f"  per_expert_us: {model.per_expert_us:.4g}  # {_interval(model.per_expert_interval_us)}",
        f"  per_pair_us: {per_pair}  # {model.per_pair_words}",
        f"  r2: {model.r2:.4f}",
        f"  tokens: [{', '.join(map(str, tokens))}]",
        "  basis: measured",
        f"  source: {json.dumps(_source(run), ensure_ascii=False)}",
    ]
    problems = _problems(steps, model)
    if problems:
        return False, _as_comment([f"not a device's figure: {'; '.join(problems)}", title, *lines])
    return True, "\n".join(f"  {line}" for line in [title, *lines])


def _model(steps: Steps) -> _Model | None:
    cost, line = steps.cost, steps.line
    if cost is not None and cost.intervals_us[2][0] > 0:
        base, expert, pair = cost.intervals_us
        words = _interval(pair)
        return _Model(cost.intercept_us, base, cost.per_expert_us, expert, cost.per_pair_us, words, cost.r2)
    if line is None:
        return None
    words = (
        "not fitted: pairs do not vary on their own"
        if cost is None
        else f"{cost.per_pair_us:.3g} {_interval(cost.intervals_us[2])} us: not above 0"
    )
    return _Model(
        line.intercept_us,
        (line.intercept_low_us, line.intercept_high_us),
        line.slope_us,
        (line.slope_low_us, line.slope_high_us),
        None,
        words,
        line.r2,
    )


def _problems(steps: Steps, model: _Model) -> list[str]:
    """Why these are no figures for a device's file."""
    facts = steps.comparisons[0]
    found = []
    if facts.scale != 1:
        found.append(f"sizes x {facts.scale:g} of the true ones, which no model has")
    if any(one.oversubscribed for one in steps.comparisons):
        found.append("more ranks than cores: they shared time slices")
    if model.per_expert_us <= 0:
        found.append("an activated expert more takes no longer")
    if model.base_us < 0:
        found.append("the base is below 0: time is no straight line here")
    return found


def _source(run: Run) -> str:
    versions = (("torch", run.torch), ("megatron-core", run.megatron_core))
    known = [f"{name} {version}" for name, version in versions if version is not None]
    return ", ".join([run.device_name, *known, f"run {run.run_id}"])


def _interval(interval: Interval) -> str:
    return f"[{interval[0]:.4g}, {interval[1]:.4g}]"


def _as_comment(lines: Sequence[str]) -> str:
    return "\n".join(f"  # {line.removeprefix('# ')}" for line in lines)
