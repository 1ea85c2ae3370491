"""Turn what ``advise`` is asked into a config of modelled emulation: whose layer, which traffic, which candidates.

Needs no torch until a question is modelled: mistakes are found, and the plan is printed, before it is imported.
"""

from __future__ import annotations

import argparse
import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from moe_ep_bench.bench.words import fit_on
from moe_ep_bench.config import MEASURED, Experiment, RecordedConfig, SyntheticConfig
from moe_ep_bench.config.files import experiments_of, read_config
from moe_ep_bench.cost_model.devices import PRECISIONS
from moe_ep_bench.cost_model.table_devices import (
    DTYPE,
    TableDevice,
    default_links,
    dtype_of,
    load_device,
    load_links,
)
from moe_ep_bench.cost_model.tables import is_table
from moe_ep_bench.errors import UserError, naming
from moe_ep_bench.files import atomic_path, check_folder, stable_hash
from moe_ep_bench.models import ModelSpec, load_model, preset_of
from moe_ep_bench.policies import policy_class
from moe_ep_bench.workload import open_trace
from moe_ep_bench.workload.counts import one_rank_words, read_counts
from moe_ep_bench.workload.skews import PATTERNS

if TYPE_CHECKING:
    from moe_ep_bench.bench.comparison import Comparison

# Those of a question that names none.
MAX_DROPPED, MAX_LOST_MASS = 0.10, 0.05
PEAK_LOADS = (1.2, 2.0, 4.0)
DEVICE = "h100-sxm"
_NODE = 8
# With fewer batches there are no intervals (``timing.statistics.MIN_BATCHES``).
_BATCHES = 10
# Chance decides which experts of a synthetic workload are busy and share a rank; one draw of it says little. Batches of
# a draw are alike: of --model's, two to four are enough, so that EPLB plans each for the others by so many tokens.
DRAWS, _MOST_DRAWS = 5, 100
_BATCHES_OF_A_DRAW, _PLANNED_TOKENS = 4, 2**16
_SEQUENCE_LENGTH = 128
# Score mass of the top-k, where a recording has scores that are normalised over it.
_TOPK_SHARE = 0.7
# Tokens of each request in the cache, at decode.
CONTEXT_LENGTH = 2048
# Keys of a config that do not enter the question, or that modelled emulation reads only to refuse them.
_UNREAD = (
    *("policies", "measure", "claims", "layer.dispatcher", "layer.cuda_graph"),
    "emulate.replication",
    "emulate.rebalance",
)
# Options that stand in place of a config.
_OF_MODEL = (
    "model",
    "ep",
    "tokens",
    "trace",
    "counts",
    "peak_load",
    "decode_tokens",
    "context",
    "dtype",
    "prompt_length",
)
# Options that are keys of ``emulate``.
_SENT = ("transport", "dispatch_dtype")
CONFIG_NAME = "advise.yaml"


@dataclass(frozen=True)
class Bounds:
    """What a policy may cost: shares of top-k pairs dropped at most, and of the top-k's score mass kept at least."""

    max_dropped: float
    min_retained: float

    @staticmethod
    def of(max_dropped: str | None, max_lost_mass: str | None) -> Bounds:
        """Read the options; where one alone is given, the other does not bind.

        Raises:
            ValueError: one of them is no share; names the option.
        """
        if max_dropped is None and max_lost_mass is None:
            return Bounds(MAX_DROPPED, 1 - MAX_LOST_MASS)
        dropped = 1.0 if max_dropped is None else parse_share("--max-dropped", max_dropped)
        return Bounds(dropped, 0.0 if max_lost_mass is None else 1 - parse_share("--max-lost-mass", max_lost_mass))


def parse_share(option: str, text: str) -> float:
    """Read ``5%`` or ``0.05``.

    Raises:
        ValueError: it is no share; names the option.
    """
    try:
        share = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = math.nan
    if not 0 <= share <= 1:
        raise UserError(f"{option}: expected a share such as 5% or 0.05, 0 to 1; got {text}")
    return share


@dataclass(frozen=True)
class Question:
    """A config file's text and its points; what was given by default, and which candidates were left out and why."""

    text: str
    experiments: tuple[Experiment, ...]
    assumed: tuple[str, ...]
    left_out: tuple[str, ...]
    out: Path
    from_flags: bool = True

    @property
    def config(self) -> Path:
        """Where the config is written."""
        return self.out / CONFIG_NAME

    @property
    def summary(self) -> str:
        """What will be modelled; one line."""
        first, num_points = self.experiments[0], len(self.experiments)
        lossless = (*first.emulate.replication, *first.emulate.rebalance)
        num_candidates = len(first.make_policies()) + len(lossless)
        points = f" x {num_points} points" if num_points > 1 else ""
        device = first.emulate.device
        on = f"experts by {device}, the rest modelled" if is_table(device) else f"modelled on {device}"
        return (
            f"{first.model.spec().name}, {num_candidates} candidates x {first.workload.num_batches} batches{points}, "
            f"{on} and {first.emulate.links}"
        )

    @property
    def unfit(self) -> tuple[str, ...]:
        """Why the model does not fit the device on so many ranks, a line each; nothing where it does."""
        return tuple(dict.fromkeys(filter(None, self._lacking)))

    @property
    def _lacking(self) -> list[str]:
        """Of each point why the model does not fit the device; empty where it does."""
        devices = [(experiment, load_device(experiment.emulate.device)) for experiment in self.experiments]
        return [
            fit_on(point, point.virtual_ranks, device.name, device.memory_gb * 1e9).words or ""
            for point, device in devices
        ]

    @property
    def plan(self) -> str:
        """The summary, what is assumed, left out and measured elsewhere, and the config with candidates and traffic."""
        notes = [f"by default: {words}" for words in self.assumed] + [f"left out: {words}" for words in self.left_out]
        notes += [device.describe(num_tokens=tokens) for device, tokens in self._tables]
        notes = [*dict.fromkeys(notes), *self.unfit]
        return "\n".join([self.summary, *notes, f"config: {self.config} (not written)", "", self.text.rstrip()])

    @property
    def _tables(self) -> list[tuple[TableDevice, int]]:
        """Devices that are tables, each with a batch's tokens."""
        found = []
        for experiment in self.experiments:
            device = load_device(experiment.emulate.device)
            if isinstance(device, TableDevice):
                num_tokens = experiment.workload.total_tokens(experiment.virtual_ranks)
                found.append((device.for_layer(*_layer_of(experiment)), num_tokens))
        return found

    @property
    def tables(self) -> tuple[str, ...]:
        """What tables say of experts beside the roofline, and beyond which rows; a line each."""
        words = (f"experts by {device.table_name}: {device.compared(tokens)}" for device, tokens in self._tables)
        return tuple(dict.fromkeys(words))

    def check_fit(self) -> None:
        """Refuse a model that fits on none of the asked EP sizes.

        Raises:
            ValueError: one line that says how much it lacks.
        """
        lacking = self._lacking
        if all(lacking):
            raise UserError(f"{'--ep' if self.from_flags else 'layer.ep_size'}: {lacking[0]}")

    def check_out(self) -> None:
        """Refuse a directory with results of another question.

        Raises:
            ValueError: one line that names the directory.
        """
        check_folder(self.out, "--out")
        if (self.out / "run.json").exists() and not (self.config.exists() and self.config.read_text() == self.text):
            raise UserError(f"--out {self.out}: holds results of another question; expected another directory")

    def compare(self, *, try_out: bool = True) -> list[Comparison]:
        """Plan the comparisons (``plan.plan_experiments``); imports torch, as all that comes after the plan does."""
        import torch

        from moe_ep_bench.bench.plan import VIRTUAL, plan_experiments

        config, on_cpu = Path(self.config.name), not torch.cuda.is_available()
        return plan_experiments(config, self.experiments, VIRTUAL, on_cpu=on_cpu, try_out=try_out)

    def check_rest(self) -> None:
        """Find out whether what a layer comes to in a whole model can be modelled.

        Raises:
            ValueError: the model or the device does not state what a whole model needs; one line.
        """
        from moe_ep_bench.bench.description import rest_of

        for comparison in self.compare(try_out=False):
            rest_of(comparison)

    def model(self, *, force: bool = False) -> int:
        """Write the config and model its comparisons; return the exit status as ``emulate`` does.

        Raises:
            ValueError: the question cannot be modelled; one line, and nothing is written.
        """
        from moe_ep_bench.bench.run import emulate_plan

        comparisons = self.compare()
        with atomic_path(self.config) as temporary:
            temporary.write_text(self.text)
        return emulate_plan(comparisons, self.out, force=force)


def check_reading(options: argparse.Namespace) -> None:
    """Refuse what goes with a question, where results are there to be read.

    Raises:
        ValueError: one line that names the option.
    """
    refused = (*_OF_MODEL, *_SENT, "draws", "device", "links", "out", "overrides", "force", "dry_run")
    _refuse(options, refused, f"with {options.config}: a results directory is only read")


def _refuse(options: argparse.Namespace, names: Sequence[str], why: str) -> None:
    for option in names:
        if getattr(options, option) not in (None, False, []):
            name = "set" if option == "overrides" else option.replace("_", "-")
            raise UserError(f"--{name}: expected none {why}")


def _layer_of(experiment: Experiment) -> tuple[ModelSpec, int, str]:
    """What devices and links know of an experiment's layer: the model, how many ranks, the dtype."""
    return experiment.model.spec(), experiment.virtual_ranks, experiment.layer.dtype


def ask(options: argparse.Namespace, bounds: Bounds | None = None, *, decode: bool = False) -> Question:
    """Read the options of ``advise``: a config, or ``--model`` with what goes with it.

    Args:
        decode: ask of ``--decode-tokens``, in place of ``--tokens``.

    Raises:
        ValueError: one line: the option or the key, the value, what is allowed.
    """
    if options.config is None:
        where = Path(CONFIG_NAME)
        raw, sweep, assumed = _of_flags(options, decode)
    else:
        where = options.config
        raw, sweep, assumed = _of_config(options)
    if decode:
        raw["whole"] = {"context_length": CONTEXT_LENGTH if options.context is None else options.context}
    raw["emulate"] = _with_links(raw, sweep, options, assumed)
    raw["policies"] = [{"name": "topk"}]  # Any will do to find what the workloads are.
    experiments = experiments_of(where, *copy.deepcopy((raw, sweep)))
    if options.config is not None and any(experiment.workload.is_unskewed for experiment in experiments):
        loads = ", ".join(f"{load:g}" for load in PEAK_LOADS)
        assumed.append(f"traffic without skew, as the config sets none (sweep workload.peak_load over {loads})")
    if options.config is None and raw["layer"]["dtype"] == DTYPE and options.dtype is None:
        assumed.append(f"{DTYPE} (--dtype)")
    if options.config is None and options.transport is None:
        assumed.append("NCCL's pairs (--transport copies: DeepEP's)")
    raw["policies"], lossless, left_out = candidates(experiments, bounds or Bounds.of(None, None))
    raw["emulate"] |= lossless
    sweep = _with_draws(raw, sweep, options, experiments)
    text = yaml.safe_dump({**raw, **({"sweep": sweep} if sweep else {})}, sort_keys=False)
    experiments = experiments_of(where, *copy.deepcopy((raw, sweep)))
    with naming("--links, --ep" if options.config is None else f"{where}: emulate.links, layer.ep_size"):
        for experiment in experiments:
            links = load_links(experiment.emulate.links or "").for_layer(*_layer_of(experiment))
            links.all_gather_us(0, experiment.virtual_ranks)
    with naming("--device, --dtype" if options.config is None else f"{where}: emulate.device, layer.dtype"):
        for experiment in experiments:
            load_device(experiment.emulate.device).for_layer(*_layer_of(experiment))
    name = f"{options.config.stem}-advised" if options.config else f"advise-{stable_hash(text)[:8]}"
    if decode and options.context is None:
        assumed.append(f"{CONTEXT_LENGTH:,} tokens in each request's cache")
    found = tuple(experiments), tuple(assumed), tuple(left_out), options.out or Path("results", name)
    return Question(text, *found, from_flags=options.config is None)


def ask_both(options: argparse.Namespace, bounds: Bounds | None = None) -> dict[str, Question]:
    """Read the options of ``advise`` for prefill and, with ``--decode-tokens``, for decode; by phase.

    Raises:
        ValueError: as ``ask``.
    """
    if options.decode_tokens is None and options.context is not None:
        raise UserError("--context: expected --decode-tokens beside it, whose requests have it; got none")
    if options.decode_tokens is None or options.config is not None:
        return {"": ask(options, bounds)}
    found = {phase: ask(options, bounds, decode=phase == "decode") for phase in ("prefill", "decode")}
    if options.out is not None:
        found = {phase: replace(question, out=options.out / phase) for phase, question in found.items()}
    return found


def _with_draws(
    raw: dict[str, Any], sweep: dict[str, Any], options: argparse.Namespace, experiments: Sequence[Experiment]
) -> dict[str, Any]:
    """The sweep with several draws of the traffic, where chance decides how busy ranks are."""
    draws = DRAWS if options.draws is None else options.draws
    is_drawn = "workload.seed" not in sweep and any(map(_is_drawn, experiments))
    if not 1 <= draws <= _MOST_DRAWS:
        raise UserError(f"--draws: expected 1 to {_MOST_DRAWS}; got {draws}")
    if options.draws is not None and not is_drawn:
        raise UserError(f"--draws: expected none where chance does not decide how busy ranks are; got {draws}")
    if draws == 1 or not is_drawn:
        return sweep
    if options.config is None:
        enough = min(_BATCHES_OF_A_DRAW, 1 + math.ceil(_PLANNED_TOKENS / raw["workload"]["num_tokens"]))
        raw["workload"]["num_batches"] = max(enough, math.ceil(_BATCHES / draws))
    seed = experiments[0].workload.seed
    # First, so that points of one draw, which share its random numbers, follow each other.
    return {"workload.seed": [seed + number for number in range(draws)], **sweep}


def _of_flags(options: argparse.Namespace, decode: bool) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """A config's values, its sweep, and what was assumed."""
    if options.model is None:
        raise UserError("advise: expected a config, a results directory or --model; got none")
    if options.overrides:
        raise UserError(f"--set {options.overrides[0]}: goes with a config; expected the options of --model")
    with naming("--model"):
        model = load_model(options.model)
    ep, tokens, peak_load = options.ep, options.decode_tokens if decode else options.tokens, options.peak_load
    counted, context, prompt = "decode-tokens" if decode else "tokens", options.context, options.prompt_length
    if options.trace and options.counts:
        raise UserError(f"--counts: expected none beside --trace, which has loads of its own; got {options.counts}")
    if options.dtype not in (None, *PRECISIONS):
        raise UserError(f"--dtype: expected one of {', '.join(PRECISIONS)}; got {options.dtype}")
    most, has_loads = model.num_experts / model.top_k, options.trace or options.counts
    for option, value, expected, is_right in (
        ("ep", ep, "a number beside --model", ep is not None),
        (counted, tokens, "a number beside --model", tokens is not None),
        ("ep", ep, f"a divisor of the {model.num_experts} experts of {model.name}", ep and model.num_experts % ep == 0),
        (counted, tokens, f"at least one for each of the {ep} ranks", tokens and ep and tokens >= ep > 0),
        ("prompt-length", prompt, "none beside --trace, which has its own", prompt is None or not options.trace),
        ("prompt-length", prompt, f"1 to {tokens} tokens (--tokens)", prompt is None or 1 <= prompt <= tokens),
        ("context", context, "at least one token in each request's cache", context is None or context > 0),
        ("peak-load", peak_load, "none beside --trace or --counts, whose skew it is", not (has_loads and peak_load)),
        ("peak-load", peak_load, f"1 to {most:g} (experts / top-k)", peak_load is None or 1 <= peak_load <= most),
    ):
        if not is_right:
            raise UserError(f"--{option}: expected {expected}; got {'none' if value is None else f'{value:g}'}")
    length = 1 if decode else options.prompt_length or min(_SEQUENCE_LENGTH, tokens // ep)
    traffic: dict[str, Any] = {"kind": "synthetic", "sequence_length": length}
    prompts = [] if decode or options.prompt_length else [f"prompts of {length} tokens (--prompt-length)"]
    sweep: dict[str, Any] = {}
    if options.trace is not None:
        traffic, assumed = _recorded(options.trace, model, decode)
    elif options.counts is not None:
        counts, assumed = _counted(options.counts, model)
        traffic, assumed = traffic | counts, assumed + prompts
    else:
        assumed = prompts
        if peak_load is None:
            loads = sweep["workload.peak_load"] = peak_loads(model, tokens)
            if None in loads:
                assumed = [*assumed, f"no peak loads that chance alone exceeds with {tokens:,} tokens"]
        else:
            traffic["peak_load"] = peak_load
    preset = preset_of(options.model)
    raw = {
        "name": "advise",
        "model": {"preset": preset} if preset else {"hf_config": str(Path(options.model).absolute())},
        "workload": {"num_tokens": tokens, "num_batches": _BATCHES, "seed": 1, **traffic},
        "layer": {"dtype": options.dtype or dtype_of(options.device), "ep_size": ep},
    }
    return raw, sweep, assumed


def peak_loads(model: ModelSpec, num_tokens: int) -> list[float | None]:
    """Peak loads to show where none is known, as far as such a batch can have them; else no skew but chance's.

    Chance alone gives an expert's load a peak; Bernstein's inequality bounds it.
    """
    mean = num_tokens * model.top_k / model.num_experts
    surprise = math.log(1000 * model.num_experts)
    least = 1 + math.sqrt(2 * surprise / mean) + 2 * surprise / (3 * mean)
    found = [load for load in PEAK_LOADS if least <= load <= model.num_experts / model.top_k]
    return [*([None] if len(found) < len(PEAK_LOADS) else []), *found]


def _batches_of_a_layer(num_layers: int) -> int:
    """Two at least, so that EPLB plans for another batch than it meets."""
    return max(2, math.ceil(_BATCHES / num_layers))


def _counted(path: Path, model: ModelSpec) -> tuple[dict[str, Any], list[str]]:
    """The workload of counted experts, in all counted layers."""
    with naming("--counts"):
        load_LE = read_counts(path)
    num_layers, num_experts = load_LE.shape
    if num_experts != model.num_experts:
        raise UserError(
            f"--counts {path}: expected counts of {model.num_experts} experts, as {model.name} has; got {num_experts}"
        )
    found = {"skew_from": str(Path(path).absolute()), "layer": "all"}
    assumed = [f"loads of all {num_layers} counted layers, experts in order on ranks, tokens that choose independently"]
    assumed += [words] if (words := one_rank_words(load_LE)) else []
    return {**found, "num_batches": _batches_of_a_layer(num_layers)}, assumed


def _refuse_counts(path: Path) -> None:
    """Say of a file that is given as a recording that it holds counts, if it does."""
    if not path.is_file():  # A pipe without a writer would be waited for.
        return
    try:
        with path.open("rb") as file:
            is_text = file.read(64).lstrip()[:1] in (b"{", b"[")
        num_layers = len(read_counts(path)) if is_text or path.suffix == ".npz" else 0
    except (OSError, ValueError):
        return
    if num_layers:
        raise UserError(
            f"--trace {path}: expected a recording, got counts of {num_layers} layers' experts; give them as --counts"
        )


def _recorded(path: Path, model: ModelSpec, decode: bool) -> tuple[dict[str, Any], list[str]]:
    """The workload of a recording, in all its layers."""
    _refuse_counts(path)
    with naming("--trace"):
        trace = open_trace(path)
    if (trace.num_experts, trace.top_k) != (model.num_experts, model.top_k):
        raise UserError(
            f"--trace {path}: expected a recording of {model.num_experts} experts, top-{model.top_k}, as {model.name} "
            f"has them; got {trace.num_experts}, top-{trace.top_k} ({trace.metadata['model']})"
        )
    found = {
        "kind": "recorded",
        "trace": str(Path(path).absolute()),
        "layer": "all",
        "num_batches": _batches_of_a_layer(trace.num_layers),
        "arrangement": "decode" if decode or trace.metadata["phase"] == "decode" else "sequences",
        "tail": "recorded" if trace.has_full_scores else "popularity",
    }
    assumed = [f"all {trace.num_layers} recorded layers"]
    if trace.scores_are_normalised:
        found["topk_share"] = _TOPK_SHARE
        assumed.append(f"top-k score mass {_TOPK_SHARE:g}")
    if decode and trace.metadata["phase"] != "decode":
        assumed.append("requests that decode route as their prompts did")
    return found, assumed


def _of_config(options: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """A config's values and its sweep, without what does not enter the question, and what was assumed."""
    _refuse(options, _OF_MODEL, "with a config, whose keys say that; --set KEY=VALUE changes one")
    raw, sweep = read_config(options.config, options.overrides)
    raw.setdefault("policies", [{"name": "topk"}])  # its own are no candidates, so it needs none
    experiments_of(options.config, *copy.deepcopy((raw, sweep)))  # what is wrong with it is said as of any config
    for key in _UNREAD:
        section, _, name = key.rpartition(".")
        (raw.get(section) or {} if section else raw).pop(name, None)
    sweep = {key: values for key, values in sweep.items() if not key.startswith(_UNREAD)}
    sweep.pop("workload.num_batches", None)
    wanted = raw["workload"].get("num_batches", _BATCHES)
    raw["workload"]["num_batches"] = max(wanted, _BATCHES)
    few = f"{_BATCHES} batches in place of {wanted}, of which there would be no intervals"
    return raw, sweep, [few] if wanted < _BATCHES else []


def _with_links(
    raw: dict[str, Any], sweep: dict[str, Any], options: argparse.Namespace, assumed: list[str]
) -> dict[str, Any]:
    """The config's section ``emulate`` with a device and links, those of an H100 by default."""
    found = dict(raw.get("emulate") or {})
    for key, given, load in (("device", options.device, load_device), ("links", options.links, load_links)):
        if given is not None:
            with naming(f"--{key}"):
                load(given)
            found[key] = str(Path(given).absolute()) if given.endswith(".yaml") else given
            sweep.pop(f"emulate.{key}", None)
    for key in _SENT:
        if getattr(options, key) is not None:
            found[key] = getattr(options, key)
            sweep.pop(f"emulate.{key}", None)
    devices = [device for device in sweep.pop("emulate.device", []) if device != MEASURED]
    if devices:
        sweep["emulate.device"] = devices
    elif found.get("device", MEASURED) == MEASURED:
        found["device"] = DEVICE
        assumed.append(f"device {DEVICE}")
    if found.get("links") is None and "emulate.links" not in sweep:
        sizes = [*sweep.get("layer.ep_size", []), (raw.get("layer") or {}).get("ep_size")]
        beyond_node = max(size or _NODE for size in sizes) > _NODE
        found["links"] = default_links(found.get("device", DEVICE), beyond_node=beyond_node)
        assumed.append(f"links {found['links']}")
    return found


def candidates(
    experiments: Sequence[Experiment], bounds: Bounds
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], list[str]]:
    """Policies of the four papers at their usual settings, ``budget_drop`` at the user's bounds, a spare slot for EPLB,
    balanced evenly and by LP, and what the phase or the workload rules out.

    Settings in experts are those of the papers' models, scaled to this one's experts and top-k. Rules that a paper only
    compares with (``pruned``, ``expert_drop``, ``load_only``) are no candidates.
    """
    model = experiments[0].model.spec()
    num_experts, top_k = model.num_experts, model.top_k
    policies = [
        {"name": "token_drop", "capacity_factor": [1.0, 1.5, 2.0]},
        {"name": "token_drop", "capacity_factor": 1.0, "granularity": "device"},
        {"name": "expanded_drop", "capacity_factor": [1.0, 1.5, 2.0]},
        {"name": "oea", "k0": sorted({-(-3 * top_k // 8), -(-5 * top_k // 8)})},
        {"name": "laser", "eps_high": 0.6, "t_fix": 0.3, "c": min(2 * top_k, num_experts)},
        {"name": "xshare", "k0": 1, "budget": [max(1, num_experts // 8), max(1, num_experts // 4)]},
        {"name": "xshare", "k0": 1, "scope": "rank", "rank_budget": max(1, num_experts // 32)},
        {"name": "xshare", "k0": 1, "scope": "request", "request_budget": max(1, num_experts // 32)},
    ]
    budgets = {"max_dropped": bounds.max_dropped, "max_lost_mass": round(1 - bounds.min_retained, 6)}
    policies += [{"name": "budget_drop", key: budget} for key, budget in budgets.items() if 0 < budget < 1]
    workloads = [one.workload for one in experiments]
    lacks_scores = any(isinstance(one, RecordedConfig) and one.tail != "recorded" for one in workloads)
    kept, left_out, idle = [], [], []
    is_decode = any(one.whole.context_length or one.workload.is_step for one in experiments)
    for entry in policies:
        words = " ".join(str(value) for key, value in entry.items() if key in ("name", "scope"))
        if not is_decode and policy_class(entry["name"]).acts_in == ("decode",):
            idle.append(entry["name"])
        elif policy_class(entry["name"]).looks_past_top_k and lacks_scores:
            left_out.append(f"{words}: looks past the top-k, of which the recording has no scores")
        elif entry.get("scope") == "request" and any(one.request_tokens == 1 for one in workloads):
            left_out.append(f"{words}: decides for a request's tokens, of which a step has one")
        else:
            kept.append(entry)
    names = ", ".join(dict.fromkeys(idle))
    left_out += [f"{names}: cannot act at prefill, where a batch activates all experts"] if idle else []
    why = "experts of whole models are not replicated" if any(one.scope == "model" for one in experiments) else ""
    if any(one.layer.ep_size == 1 for one in experiments):
        why = why or "one rank holds all experts"
    left_out += [f"EPLB, LLEP, UltraEP: {why}"] if why else []
    spare = {"spare_per_rank": 1}
    balancers = [{}, {"balancer": "lp"}, *([{"balancer": "activated"}] if is_decode else [])]
    lossless = {
        "replication": [*({**spare, **balancer} for balancer in balancers), {**spare, "plan": "variance"}],
        "rebalance": [] if is_decode else [{"name": "llep"}, {"name": "ultra"}],
    }
    lossless["rebalance"] += [{"name": "waterfill"}] if model.shared_ffn_hidden_size else []
    return kept, {key: [] if why else wanted for key, wanted in lossless.items()}, left_out


def _is_drawn(experiment: Experiment) -> bool:
    """Whether chance decides how busy ranks are. A whole model's layers are several draws as they are."""
    workload, ep_size = experiment.workload, experiment.virtual_ranks
    if not isinstance(workload, SyntheticConfig) or workload.skew in PATTERNS or experiment.scope == "model":
        return False
    if workload.layer is not None:  # Every expert has its load, in its place.
        return False
    return ep_size != 1 and workload.targets(experiment.model.preset, ep_size)["rank_load"] is None
