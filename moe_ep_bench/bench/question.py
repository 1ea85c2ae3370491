"""Turn what ``advise`` is asked into a config of modelled emulation: whose layer, which traffic, which candidates.

The flags of ``--model`` make a config, of which ``--set`` changes any key. Needs no torch until a question is modelled:
mistakes are found, and the plan is printed, before it is imported.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from moe_ep_bench.bench import checks
from moe_ep_bench.bench.comparison import is_drawn
from moe_ep_bench.bench.description import served
from moe_ep_bench.bench.plan import VIRTUAL, load_models, plan_experiments
from moe_ep_bench.config import MEASURED, Experiment, RecordedConfig
from moe_ep_bench.config.files import experiments_of, override, read_config
from moe_ep_bench.cost_model.tables import load_device
from moe_ep_bench.errors import UserError, naming
from moe_ep_bench.files import atomic_path, check_folder, stable_hash
from moe_ep_bench.models import ModelSpec, load_model
from moe_ep_bench.policies import policy_class
from moe_ep_bench.workload.trace import open_trace

CONFIG_NAME = "advise.yaml"
# Flags of --model that are keys of its config; --decode-tokens is --tokens of a decode step.
_KEYS = {
    "ep": "layer.ep_size",
    "tokens": "workload.num_tokens",
    "peak_load": "workload.peak_load",
    "trace": "workload.trace",
    "device": "emulate.device",
    "links": "emulate.links",
}
_FLAGS = ("model", "decode_tokens", *_KEYS)
# Sections of a config that enter the question, and keys of theirs that do not.
_READ = ("name", "scope", "model", "workload", "layer", "whole", "emulate")
_UNREAD = ("layer.cuda_graph", "emulate.replication", "emulate.rebalance", "workload.num_batches")
# Of a question that names none.
MAX_DROPPED, MAX_LOST_MASS = 0.10, 0.05
DEVICE, CONTEXT_LENGTH, PROMPT_LENGTH = "h100-sxm", 2048, 128
_NODE = 8
# Chance decides which experts of a synthetic workload are busy and share a rank; one draw of it says little.
DRAWS = 5
# With fewer batches there are no intervals (``timing.statistics.MIN_BATCHES``). Those of a draw or a layer are alike:
# of --model's, two to four are enough, so that EPLB plans each for the others by so many tokens.
_BATCHES, _BATCHES_OF_A_DRAW, _PLANNED_TOKENS = 10, 4, 2**16
# Score mass of the top-k, where a recording has scores that are normalised over it.
_TOPK_SHARE = 0.7
_ANY_POLICY = [{"name": "topk"}]


@dataclass(frozen=True)
class Bounds:
    """What a policy may cost: shares of top-k pairs dropped at most, and of the top-k's score mass kept at least."""

    max_dropped: float
    min_retained: float

    @staticmethod
    def of(max_dropped: float | None, max_lost_mass: float | None) -> Bounds:
        """Bounds of the options; where one alone is given, the other does not bind."""
        if max_dropped is None and max_lost_mass is None:
            return Bounds(MAX_DROPPED, 1 - MAX_LOST_MASS)
        dropped, lost = (1.0 if bound is None else bound for bound in (max_dropped, max_lost_mass))
        return Bounds(dropped, 1 - lost)


# ---- a question ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Question:
    """A config file's text and its points; what of the traffic is assumed; which candidates were left out, and why."""

    text: str
    experiments: tuple[Experiment, ...]
    assumed: tuple[str, ...]
    left_out: tuple[str, ...]
    out: Path

    @property
    def config(self) -> Path:
        """Where the config is written."""
        return self.out / CONFIG_NAME

    @property
    def cautions(self) -> tuple[str, ...]:
        """Where the model does not fit; a line each."""
        return tuple(dict.fromkeys(filter(None, self._lacking)))

    @property
    def _lacking(self) -> list[str]:
        """Of each point why the model does not fit the device on so many ranks; empty where it does."""
        points = [(one, one.virtual_ranks, load_device(one.emulate.device)) for one in self.experiments]
        return [served(one).fit(ranks, device.name, device.memory_gb * 1e9).words for one, ranks, device in points]

    @property
    def plan(self) -> str:
        """What is assumed and left out, and the config with candidates and traffic."""
        notes = [f"assumed: {words}" for words in self.assumed] + [f"left out: {words}" for words in self.left_out]
        where = f"config: {self.config} (not written)"
        return "\n".join([*notes, *self.cautions, where, "", self.text.rstrip()])

    def check(self) -> None:
        """Refuse a model that fits on none of the asked EP sizes, and a directory with results of another question.

        Raises:
            ValueError: one line that says how much it lacks, or names the directory.
        """
        if all(lacking := self._lacking):
            raise UserError(f"--ep, layer.ep_size: {lacking[0]}")
        check_folder(self.out, "--out")
        if (self.out / "run.json").exists() and not (self.config.exists() and self.config.read_text() == self.text):
            raise UserError(f"--out {self.out}: holds results of another question; expected another directory")

    def model(self, *, force: bool = False) -> int:
        """Write the config and model its comparisons; return the exit status as ``emulate`` does.

        Raises:
            ValueError: the question cannot be modelled; one line, and nothing is written.
        """
        import torch

        from moe_ep_bench.bench.run import emulate_plan

        on_cpu = not torch.cuda.is_available()
        comparisons = plan_experiments(Path(CONFIG_NAME), self.experiments, VIRTUAL, on_cpu=on_cpu)
        with atomic_path(self.config) as temporary:
            temporary.write_text(self.text)
        return emulate_plan(comparisons, self.out, force=force)


def ask(options: argparse.Namespace, bounds: Bounds | None = None) -> Question:
    """Read the options of ``advise``: a config, or ``--model`` with what goes with it.

    Raises:
        ValueError: one line: the option or the key, the value, what is allowed.
    """
    where = options.config or Path(CONFIG_NAME)
    raw, sweep, assumed = _of_flags(options) if options.config is None else _of_config(options)
    _add_device(raw, sweep)
    experiments = experiments_of(where, *copy.deepcopy(({**raw, "policies": _ANY_POLICY}, sweep)))
    if all(experiment.workload.is_unskewed for experiment in experiments):
        if options.config is None:
            raise UserError("--trace, --peak-load: expected one, which says how busy experts are; got none")
        assumed.append("traffic without skew, as the config sets none (sweep workload.peak_load)")
    chosen, left_out = candidates(experiments, bounds or Bounds.of(None, None))
    raw |= {"policies": chosen.pop("policies"), "emulate": {**raw["emulate"], **chosen}}
    num_joined = len({experiment.workload.layer for experiment in experiments})
    if "workload.seed" not in sweep and any(map(_is_drawn, experiments)):
        num_joined, seed = DRAWS, experiments[0].workload.seed
        # First, so that points of one draw, which share its random numbers, follow each other.
        sweep = {"workload.seed": [seed + number for number in range(DRAWS)], **sweep}
    if "num_batches" not in raw["workload"]:
        enough = min(_BATCHES_OF_A_DRAW, 1 + math.ceil(_PLANNED_TOKENS / raw["workload"]["num_tokens"]))
        raw["workload"]["num_batches"] = max(enough, math.ceil(_BATCHES / num_joined))
    text = yaml.safe_dump({**raw, **({"sweep": sweep} if sweep else {})}, sort_keys=False)
    experiments = experiments_of(where, *copy.deepcopy((raw, sweep)))
    with naming(str(where)):
        for experiment in experiments:
            load_models(experiment, experiment.virtual_ranks)
    name = f"{options.config.stem}-advised" if options.config else f"advise-{stable_hash(text)[:8]}"
    out = options.out or Path("results", name)
    return Question(text, tuple(experiments), tuple(assumed), tuple(left_out), out)


def check_reading(options: argparse.Namespace) -> None:
    """Refuse what goes with a question, where results are there to be read.

    Raises:
        ValueError: one line that names the option.
    """
    refused = (*_FLAGS, "out", "overrides", "force", "dry_run")
    _refuse(options, refused, f"with {options.config}: a results directory is only read")


def _refuse(options: argparse.Namespace, names: Sequence[str], why: str) -> None:
    for name in names:
        if getattr(options, name) not in (None, False, []):
            raise UserError(f"{'--set' if name == 'overrides' else _flag(name)}: expected none {why}")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


# ---- from options to a config ----------------------------------------------------------------------------------------


def _of_config(options: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """A config's values and its sweep, without what does not enter the question; its policies are no candidates."""
    _refuse(options, _FLAGS, "with a config, whose keys say that; --set KEY=VALUE changes one")
    raw, sweep = read_config(options.config.absolute(), options.overrides)
    (experiment, *_) = experiments_of(options.config, *copy.deepcopy(({**raw, "policies": _ANY_POLICY}, sweep)))
    raw = {section: raw[section] for section in _READ if section in raw}
    for key in _UNREAD:
        section, _, name = key.partition(".")
        (raw.get(section) or {}).pop(name, None)
    raw["workload"]["num_batches"] = max(experiment.workload.num_batches, _BATCHES)
    sweep = {key: sweep[key] for key in sweep if key.partition(".")[0] in _READ and not key.startswith(_UNREAD)}
    return raw, sweep, []


def _of_flags(options: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """A config's values, its sweep, and what was assumed."""
    if options.model is None:
        raise UserError("advise: expected a config, a results directory or --model; got none")
    with naming("--model"):
        model = load_model(options.model)
    decode, ep = options.decode_tokens is not None, options.ep
    counted = "decode_tokens" if decode else "tokens"
    tokens, num_experts = getattr(options, counted), model.num_experts

    def wrong() -> checks.Rows:
        for flags, why in (
            (("trace", "peak_load"), "each says how busy experts are"),
            (("tokens", "decode_tokens"), "the first counts a batch of prefill, the second a step of decode"),
        ):
            given = [_flag(flag) for flag in flags if getattr(options, flag) is not None]
            yield len(given) > 1, ", ".join(map(_flag, flags)), f"one of them, for {why}", " and ".join(given)
        for flag, number in (("ep", ep), (counted, tokens)):
            yield number is None, _flag(flag), "a number beside --model", "none"
        yield ep < 1 or num_experts % ep, "--ep", f"a divisor of the {num_experts} experts of {model.name}", ep
        yield tokens < ep, _flag(counted), f"at least one for each of the {ep} ranks", tokens

    checks.refuse(wrong())
    traffic: dict[str, Any] = {
        "kind": "synthetic",
        "sequence_length": 1 if decode else min(PROMPT_LENGTH, tokens // ep),
    }
    assumed: list[str] = []
    if options.trace is not None:
        traffic, assumed = _recorded(options.trace, decode)
    preset = options.model if options.model in ModelSpec.names() else None
    raw = {
        "name": "advise",
        "model": {"preset": preset} if preset else {"hf_config": str(Path(options.model).absolute())},
        "workload": {"num_tokens": tokens, "seed": 1, **traffic},
        **({"whole": {"context_length": CONTEXT_LENGTH}} if decode else {}),
    }
    sweep: dict[str, Any] = {}
    values = {key: getattr(options, flag) for flag, key in _KEYS.items()}
    given = [f"{key}={json.dumps(value, default=str)}" for key, value in values.items() if value is not None]
    override(raw, sweep, [*given, *options.overrides])
    return raw, sweep, assumed


def _recorded(path: Path, decode: bool) -> tuple[dict[str, Any], list[str]]:
    """The workload of a recording in all its layers, and what is assumed."""
    with naming("--trace", " (counts of experts go as --set workload.skew_from=FILE --set workload.layer=all)"):
        trace = open_trace(path)
    is_of_decode = trace.metadata["phase"] == "decode"
    found = {
        "kind": "recorded",
        "layer": "all",
        "arrangement": "decode" if decode or is_of_decode else "sequences",
        "tail": "recorded" if trace.has_full_scores else "popularity",
    }
    assumed = [f"all {trace.num_layers} recorded layers"]
    if trace.scores_are_normalised:
        found["topk_share"] = _TOPK_SHARE
        assumed.append(f"top-k score mass {_TOPK_SHARE:g}")
    return found, assumed + (["requests that decode route as their prompts did"] if decode and not is_of_decode else [])


def _add_device(raw: dict[str, Any], sweep: dict[str, Any]) -> None:
    """Put a device and links into a config that has none."""
    emulate = raw.setdefault("emulate", {})
    if "emulate.device" in sweep:
        sweep["emulate.device"] = [device for device in sweep["emulate.device"] if device != MEASURED]
    elif emulate.get("device", MEASURED) == MEASURED:
        emulate["device"] = DEVICE
    if emulate.get("links") is None and "emulate.links" not in sweep:
        sizes = [*sweep.get("layer.ep_size", []), (raw.get("layer") or {}).get("ep_size")]
        beyond_node = max(size or _NODE for size in sizes) > _NODE
        with naming("emulate.device"):
            emulate["links"] = load_device(emulate.get("device", DEVICE)).links[beyond_node]


def _is_drawn(experiment: Experiment) -> bool:
    """Whether more draws say more: not of counted experts, which have their places, nor of a whole model's layers."""
    is_lone = experiment.scope == "layer" and experiment.workload.layer is None
    return is_lone and is_drawn(experiment, experiment.virtual_ranks)


# ---- candidates ------------------------------------------------------------------------------------------------------


# What loses nothing and acts in one phase only: weights take long to move for a step, which activates few experts.
_ONLY_IN = {"llep": "prefill", "ultra": "prefill", "activated": "decode"}


def _policies(model: ModelSpec, bounds: Bounds) -> list[dict[str, Any]]:
    """The four papers' policies at their usual settings, and ``budget_drop`` at the user's bounds.

    Settings in experts are those of the papers' models, scaled to this one's experts and top-k. Rules that a paper only
    compares with (``pruned``, ``expert_drop``, ``load_only``) are no candidates.
    """
    num_experts, top_k = model.num_experts, model.top_k
    budgets = {"max_dropped": bounds.max_dropped, "max_lost_mass": round(1 - bounds.min_retained, 6)}
    return [
        {"name": "token_drop", "capacity_factor": [1.0, 1.5, 2.0]},
        {"name": "token_drop", "capacity_factor": 1.0, "granularity": "device"},
        {"name": "expanded_drop", "capacity_factor": [1.0, 1.5, 2.0]},
        {"name": "oea", "k0": sorted({-(-3 * top_k // 8), -(-5 * top_k // 8)})},
        {"name": "laser", "eps_high": 0.6, "t_fix": 0.3, "c": min(2 * top_k, num_experts)},
        {"name": "xshare", "k0": 1, "budget": [max(1, num_experts // 8), max(1, num_experts // 4)]},
        {"name": "xshare", "k0": 1, "scope": "rank", "rank_budget": max(1, num_experts // 32)},
        {"name": "xshare", "k0": 1, "scope": "request", "request_budget": max(1, num_experts // 32)},
        *({"name": "budget_drop", key: budget} for key, budget in budgets.items() if 0 < budget < 1),
    ]


def _lossless(model: ModelSpec, phase: str) -> dict[str, list[dict[str, Any]]]:
    """What loses nothing in a phase, by key of ``emulate``."""
    balancers = [{}, {"balancer": "lp"}, {"balancer": "activated"}, {"plan": "variance"}]
    movers = ["llep", "ultra", *(["waterfill"] if model.shared_ffn_hidden_size else [])]
    return {
        "replication": [
            {"spare_per_rank": 1, **how} for how in balancers if _ONLY_IN.get(how.get("balancer"), phase) == phase
        ],
        "rebalance": [{"name": name} for name in movers if _ONLY_IN.get(name, phase) == phase],
    }


def candidates(experiments: Sequence[Experiment], bounds: Bounds) -> tuple[dict[str, list[dict[str, Any]]], list[str]]:
    """The candidates that can act here, and what the phase or the workload rules out, a line for each reason."""
    workloads, model = [one.workload for one in experiments], experiments[0].model.spec()
    lacks_scores = any(isinstance(one, RecordedConfig) and one.tail != "recorded" for one in workloads)
    is_decode = any(one.whole.context_length or one.workload.is_step for one in experiments)
    of_one_token = any(one.is_step and getattr(one, "tokens_per_request", 1) == 1 for one in workloads)
    kept: list[dict[str, Any]] = []
    left_out: dict[str, dict[str, None]] = {}
    for entry in _policies(model, bounds):
        kind = policy_class(entry["name"])
        if not is_decode and kind.acts_in == ("decode",):
            why = "cannot act at prefill, where a batch activates all experts"
        elif kind.looks_past_top_k and lacks_scores:
            why = "looks past the top-k, of which the recording has no scores"
        elif entry.get("scope") == "request" and of_one_token:
            why = "by request, where a step has one token of each"
        else:
            kept.append(entry)
            continue
        left_out.setdefault(why, {})[entry["name"]] = None
    lossless = _lossless(model, "decode" if is_decode else "prefill")
    for why, holds in (
        ("one rank holds all experts", any(one.layer.ep_size == 1 for one in experiments)),
        ("experts of whole models are not replicated", any(one.scope == "model" for one in experiments)),
    ):
        if holds:
            lossless = {"replication": [], "rebalance": []}
            left_out[why] = {"EPLB, LLEP, UltraEP": None}
    return {"policies": kept, **lossless}, [f"{', '.join(names)}: {why}" for why, names in left_out.items()]
