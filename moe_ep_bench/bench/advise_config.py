"""Turn what ``advise`` is asked into a config of modelled emulation: whose layer, which traffic, which candidates.

Candidates are ordinary cases of that config, which ``emulate`` takes too. The flags of ``--model`` make a config, of
which ``--set`` changes any key. Needs no torch until a question is modelled: mistakes are found, and the plan is
printed, before it is imported.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import fmean, median
from typing import Any

from moe_ep_bench.bench.description import fit_of
from moe_ep_bench.bench.layers import LAYERS, fullest_ranks, stand_ins
from moe_ep_bench.bench.plan import VIRTUAL, modelling_s, num_by_arrival, plan_experiments
from moe_ep_bench.bench.point import Point, is_drawn
from moe_ep_bench.bench.sampling import MOST_RANKS, SCORES, sample_of
from moe_ep_bench.config import MEASURED, NO_OVERLAP, TWO_BATCH, Experiment, RecordedConfig, SyntheticConfig
from moe_ep_bench.config.files import experiments_of, override, read_config
from moe_ep_bench.cost_model.expert_rows import load_device, load_device_of_layer
from moe_ep_bench.cost_model.tables import PREFIX, NoRowsError, load_links, load_links_of_layer
from moe_ep_bench.errors import UserError, naming
from moe_ep_bench.facts import AskedLayers, Assumption, CountedLayers, MissingRows, Need, has_assumed_traffic
from moe_ep_bench.facts.words import assumption_words, fit_words
from moe_ep_bench.files import atomic_path, check_folder, dump_yaml, stable_hash
from moe_ep_bench.models import ModelSpec, load_model
from moe_ep_bench.workload.targets import Skews, read_counts
from moe_ep_bench.workload.trace import open_trace

CONFIG_NAME = "advise.yaml"
# Flags that are keys of the config, and all that ask of a model; with a config ``--set`` changes a key.
_TRAFFIC = {"trace": "workload.trace", "counts": "workload.skew_from"} | {
    name: f"workload.{name}" for name in ("peak_load", "batch_peak_load")
}
_DEPLOYED = {"device": "emulate.device", "links": "emulate.links", "dtype": "layer.dtype"}
_KEYS = {"ep": "layer.ep_size", **_TRAFFIC, **_DEPLOYED}
_FLAGS = ("model", "tokens", "decode_tokens", *_KEYS)
# What ``advise`` decides by itself, whatever a config says.
_OWN = ("policies", "claims", "measure", "figures", "layer.cuda_graph", "emulate.replication", "emulate.rebalance")
# Asked both ways where nobody says.
OVERLAP = "emulate.overlap"
# Of a question that names none.
MAX_DROPPED, MAX_LOST_MASS = 0.10, 0.05
DEVICE, SYSTEM, CONTEXT_LENGTH, PROMPT_LENGTH = "h100-sxm", "h100_sxm", 2048, 128
# Chance decides which experts of a synthetic workload are busy and share a rank; one draw of it says little.
DRAWS = 5
# With fewer batches in all there are no intervals (``timing.statistics.MIN_BATCHES``). Those of one draw or layer are
# alike: two are served, and two that plans know beside the other come ahead of them, which only the model routes.
_BATCHES, _BATCHES_OF_A_DRAW, _HISTORY = 10, 2, 2
# Of a model of which nothing is recorded; and of the largest peak load that one can have, what its traffic may reach.
_STAND_IN, REACHED = "olmoe-1b-7b", 0.75
_NATIVE = [{"name": "topk"}]
# Score mass of the top-k, where a recording has scores that are normalised over it.
_TOPK_SHARE = 0.7


@dataclass(frozen=True)
class Bounds:
    """What a policy may cost: shares of top-k pairs dropped at most, and of the top-k's score mass kept at least."""

    max_dropped: float
    min_retained: float

    @staticmethod
    def of(max_dropped: float | None, max_lost_mass: float | None) -> Bounds:
        """Bounds of the options; a bound that is omitted does not apply."""
        if max_dropped is None and max_lost_mass is None:
            return Bounds(MAX_DROPPED, 1 - MAX_LOST_MASS)
        dropped, lost = (1.0 if bound is None else bound for bound in (max_dropped, max_lost_mass))
        return Bounds(dropped, 1 - lost)


@dataclass(frozen=True)
class Question:
    """A config file's text and what it compares; what is assumed, and which candidates are left out."""

    text: str
    comparisons: Sequence[Point]
    assumptions: tuple[Assumption, ...]
    out: Path

    @property
    def config(self) -> Path:
        """Where the config is written."""
        return self.out / CONFIG_NAME

    @property
    def plan(self) -> str:
        """What is assumed, and the config with candidates and traffic."""
        where = f"config: {self.config} (not written); about {modelling_s(self.comparisons):,.0f} CPU seconds"
        return "\n".join([*map(assumption_words, self.assumptions), where, "", self.text.rstrip()])

    def at(self, values: Mapping[str, Any], rules: Iterable[tuple[str, str]], most_scores: int) -> Point:
        """The question at one point, with other values of keys, of a few candidates; its config has been written.

        Args:
            most_scores: of a batch, where some of its tokens may stand for others.
            rules: name and settings of each candidate, these as JSON (``CaseFacts.policy_params``).

        Raises:
            UserError: it cannot be asked so; one line.
        """
        raw, sweep = read_config(self.config, [f"{key}={json.dumps(value)}" for key, value in values.items()])
        where = Path(self.config.name)
        emulate, policies = raw["emulate"], [one["name"] for one in raw["policies"]]
        moving = [one["name"] for one in emulate.get("rebalance") or []]
        chosen: dict[str, list[dict[str, Any]]] = {"policies": [], "rebalance": [], "replication": []}
        for name, params in rules:
            key = "policies" if name in policies else "rebalance" if name in moving else "replication"
            own = {field: value for field, value in json.loads(params).items() if value is not None}
            own |= own.pop("by_layer", {})
            if name == "waterfill":  # Its slots and its time are given, and no keys.
                own = {}
            chosen[key].append(own if key == "replication" else {"name": name, **own})
        raw["policies"] = chosen.pop("policies") or _NATIVE
        links = load_device(emulate.get("device", DEVICE)).links
        if emulate["links"] in links:
            emulate["links"] = _links_for(links, raw["layer"]["ep_size"])
        raw["emulate"] = {**emulate, **chosen}
        for key in ("sample_tokens", "sample_ranks"):
            raw["emulate"].pop(key, None)
        (experiment,) = experiments_of(where, *copy.deepcopy((raw, sweep)))
        raw["emulate"] |= sample_of([experiment], most_scores)
        experiments = experiments_of(where, raw, sweep)
        return plan_experiments(where, experiments, VIRTUAL, on_cpu=True, try_out=False)[0]

    def model(self, *, force: bool = False) -> int:
        """Write the config and model its comparisons; return the exit status as ``emulate`` does.

        Raises:
            ValueError: the directory holds results of another question.
        """
        from moe_ep_bench.bench.commands import emulate

        check_folder(self.out, "--out")
        if (self.out / "run.json").exists() and not (self.config.exists() and self.config.read_text() == self.text):
            raise UserError(f"--out {self.out}: holds results of another question; expected another directory")
        with atomic_path(self.config) as temporary:
            temporary.write_text(self.text)
        return emulate(self.comparisons, self.out, force=force)


def ask(options: argparse.Namespace, bounds: Bounds) -> Question:
    """Read the options of ``advise``: a config, or ``--model`` with what goes with it.

    Raises:
        ValueError: one line: the option or the key, the value, what is allowed; also of a model that fits the device on
            none of the asked EP sizes.
    """
    with _naming_flags(options):
        draft = _of_flags(options) if options.config is None else _of_config(options)
        asked = draft.experiments(policies=_NATIVE)
        if draft.is_of_flags and not any(_is_skewed(experiment.workload) for experiment in asked):
            draft.sweep_traffic(asked[0])
            asked = draft.experiments(policies=_NATIVE)
        draft.note_traffic(asked)
        draft.add_device(asked)
        left_out = draft.add_candidates(asked, bounds)
        draft.add_batches(asked)
        draft.choose_layers(asked)
        draft.sample_tokens(asked)
        draft.sweep_overlap(asked)
        comparisons = plan_experiments(draft.where, draft.experiments(), VIRTUAL, on_cpu=True, try_out=False)
        fits = [fit for fit in map(fit_of, comparisons) if fit is not None]
        if all(not fit.holds() for fit in fits):
            raise UserError(f"{fit_words(fits[0])}", "layer.ep_size")
    text = dump_yaml({**draft.raw, **({"sweep": draft.sweep} if draft.sweep else {})})
    name = f"{options.config.stem}-advised" if options.config else f"advise-{stable_hash(text)[:8]}"
    return Question(text, comparisons, (*draft.assumed, *left_out), options.out or Path("results", name))


@contextlib.contextmanager
def _naming_flags(options: argparse.Namespace) -> Iterator[None]:
    """Without a config, name the flag that sets a key in place of the file in which it would stand."""
    try:
        yield
    except UserError as problem:
        if options.config is not None:
            raise
        keys = {"tokens": "workload.num_tokens", "decode_tokens": "workload.num_tokens", **_KEYS}
        keys = {name: key for name, key in keys.items() if getattr(options, name) is not None}
        own = [f"--{name.replace('_', '-')}" for name, key in keys.items() if key in problem.keys]
        where = ": ".join(filter(None, [*own, problem.without(CONFIG_NAME).where]))
        raise UserError(problem.words, *problem.keys, where=where) from None


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
            flag = "set" if name == "overrides" else name.replace("_", "-")
            raise UserError(f"--{flag}: expected none {why}")


# ---- from options to a config ----------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Draft:
    """The config of a question, while it is written.

    Attributes:
        where: the file that errors name.
        raw: values of the config; ``sweep``: lists of values, by swept key.
        assumed: what nobody said, in the order in which it was found.
        is_of_flags: no file holds it.
        chooses_layers: some stand for all, for nobody names any.
    """

    where: Path
    raw: dict[str, Any]
    sweep: dict[str, Any]
    assumed: list[Assumption]
    is_of_flags: bool
    chooses_layers: bool = False

    def experiments(self, **values: Any) -> list[Experiment]:
        """The config as it stands, some sections replaced."""
        return experiments_of(self.where, *copy.deepcopy(({**self.raw, **values}, self.sweep)))

    def sweep_traffic(self, asked: Experiment) -> None:
        """Ask of balanced, typical and hard traffic, as recorded of the model or of one that stands in for it."""
        preset = asked.model.preset
        skews = Skews.named(preset if preset in Skews.names() else _STAND_IN).by_name()
        of = skews["mixed"].of or (asked.model.spec().name if preset in Skews.names() else load_model(_STAND_IN).name)
        spec = asked.model.spec()
        most = REACHED * spec.num_experts / spec.top_k
        peaks = (1.0, *(round(min(skews[name].peak_load, most), 2) for name in ("mixed", "worst_layer")))
        self.sweep = {**self.sweep, "workload.peak_load": list(dict.fromkeys(peaks))}
        self.assumed.append(Assumption(kind="traffics", names=[of], peak_loads=peaks))

    def note_traffic(self, asked: Sequence[Experiment]) -> None:
        """Note where the traffic has no skew, or counted layers stand for others."""
        workloads = [experiment.workload for experiment in asked]
        if not any(map(_is_skewed, workloads)):
            self.assumed.append(Assumption(kind="no_skew"))
        counted = {
            one.workload.skew_from: one.model.moe_layers
            for one in asked
            if isinstance(one.workload, SyntheticConfig) and one.workload.skew_from
        }
        for path, moe_layers in sorted(counted.items()):
            counts = read_counts(path, moe_layers)
            if counts.dense or counts.missing:
                layers = CountedLayers(file=path.name, **counts.describe())
                self.assumed.append(Assumption(kind="counted_layers", counted=layers))

    def add_device(self, asked: Sequence[Experiment]) -> None:
        """Put in a device and links where there are none: measured elsewhere where tables have the layer."""
        self.raw["emulate"] = emulate = self.raw.get("emulate") or {}
        system, why = f"{PREFIX}{SYSTEM}", dict[str, MissingRows]()
        if "emulate.device" in self.sweep:
            devices = [device for device in self.sweep["emulate.device"] if device != MEASURED]
            self.sweep["emulate.device"], system = devices or [DEVICE], ""
        elif (named := emulate.get("device", MEASURED)) != MEASURED:
            system = named.partition("/")[0] if named.startswith(PREFIX) else ""
        else:
            emulate["device"] = system
            try:
                _find_rows(asked, system, of_links=False)
            except NoRowsError as problem:
                emulate["device"], why["experts"] = DEVICE, problem.missing
        if emulate.get("links") is None and "emulate.links" not in self.sweep:
            emulate["links"] = self._links_of_device()
            # Scaled links and copies are of built-in links.
            own = any(one.emulate.bandwidth_scale != 1 or one.emulate.copies != "pair" for one in asked)
            if system and not own and all(experiment.virtual_ranks > 1 for experiment in asked):
                try:
                    _find_rows(asked, system, of_links=True)
                    emulate["links"] = system
                except NoRowsError as problem:
                    why["exchange"] = problem.missing
        for missing in dict.fromkeys(why.values()):
            parts = [part for part, one in why.items() if one == missing]
            self.assumed.append(Assumption(kind="modelled", names=parts, missing=missing))

    def _links_of_device(self) -> str:
        """The links that the device's file names, inside a node or beyond one."""
        sizes = [*self.sweep.get("layer.ep_size", []), (self.raw.get("layer") or {}).get("ep_size")]
        with naming(keys=["emulate.device"]):
            links = load_device(self.raw["emulate"].get("device", DEVICE)).links
        return _links_for(links, max(size or 1 for size in sizes))

    def add_candidates(self, asked: Sequence[Experiment], bounds: Bounds) -> list[Assumption]:
        """Put in the candidates that can act here; return those that are left out."""
        chosen, left_out = candidates(asked, bounds)
        self.raw["policies"] = chosen.pop("policies")
        self.raw["emulate"] |= chosen
        return left_out

    def add_batches(self, asked: Sequence[Experiment]) -> None:
        """Ask for as many draws and batches as intervals need, in the order of time where they are recorded."""
        workloads = [experiment.workload for experiment in asked]
        num_joined = len({workload.layer for workload in workloads})
        if self.chooses_layers:
            num_joined = min(num_joined, LAYERS)
        if "workload.seed" not in self.sweep and any(map(_is_drawn, asked)):
            num_joined, seed = DRAWS, workloads[0].seed
            # First, so that points of one draw, which share its random numbers, follow each other.
            self.sweep = {"workload.seed": [seed + number for number in range(num_joined)], **self.sweep}
        elif any(map(_is_drawn, asked)):
            num_joined = len(self.sweep["workload.seed"])
        workload = self.raw["workload"]
        fewest = max(_BATCHES_OF_A_DRAW, math.ceil(_BATCHES / num_joined))
        given = workload.get("num_batches", fewest)
        workload["num_batches"] = num_batches = max(given, fewest)
        if given < fewest:
            self.assumed.append(Assumption(kind="batches", num_batches=(given, fewest)))
        if isinstance(workloads[0], RecordedConfig) and not {"order", "history"} & workload.keys():
            self._add_windows(asked, num_batches)
        elif isinstance(workloads[0], SyntheticConfig) and self.raw["emulate"]["replication"]:
            workload.setdefault("history", _HISTORY)

    def _add_windows(self, asked: Sequence[Experiment], num_batches: int) -> None:
        """Have plans know batches ahead of those that they serve, as many or half as many, or draw all of them.

        Where a recording has fewer, requests repeat.
        """
        of_one_layer = {stable_hash(one.workload.model_dump(mode="json", exclude={"layer"})): one for one in asked}
        plans = self.raw["emulate"]["replication"]
        possible = min(num_by_arrival(one, 2 * num_batches) for one in of_one_layer.values())
        needed = num_batches + (-(-num_batches // 2) if plans else 0)
        if possible < needed:
            self.raw["workload"]["order"] = "shuffled"
            names = ["plans"] if plans else []
            self.assumed.append(Assumption(kind="shuffled", names=names, num_batches=(needed, possible)))
        else:
            window = min(possible - num_batches, num_batches)
            self.raw["emulate"]["replication"] = [{**one, "window": window} for one in plans]

    def choose_layers(self, asked: Sequence[Experiment]) -> None:
        """Have some layers stand for all where nobody names them, by their loads in the batches that are asked for."""
        layers = list(dict.fromkeys(layer for one in asked if (layer := one.workload.layer) is not None))
        if not self.chooses_layers or len(layers) <= LAYERS:
            return
        firsts = [one for one in self.experiments(policies=_NATIVE) if one.workload.layer == layers[0]]
        points = plan_experiments(self.where, firsts, VIRTUAL, on_cpu=True, try_out=False)
        fullest = fullest_ranks(points, layers)
        chosen = [layers[place] for place in stand_ins(map(fmean, zip(*fullest.values(), strict=True)))]
        self.sweep["workload.layer"] = chosen
        self.raw["workload"].pop("layer", None)
        spread = {ep_size: (min(load_L), median(load_L), max(load_L)) for ep_size, load_L in fullest.items()}
        found = AskedLayers(asked=chosen, num_layers=len(layers), fullest_rank=spread)
        self.assumed.append(Assumption(kind="asked_layers", layers=found))

    def sample_tokens(self, asked: Sequence[Experiment]) -> None:
        """Have some tokens stand for others where batches are large, by what divides them; of all that is asked alike.

        Recorded tokens and those of ranks that differ are never alike.
        """
        if "sample_tokens" not in self.raw["emulate"]:
            # Three traffics of many ranks have half as many each, and take about as long as one.
            is_large = has_assumed_traffic(self.assumed) and min(one.virtual_ranks for one in asked) > MOST_RANKS
            self.raw["emulate"] |= sample_of(asked, SCORES // 2 if is_large else SCORES)

    def sweep_overlap(self, asked: Sequence[Experiment]) -> None:
        """Ask with overlap and without, where nobody says and ranks may overlap."""
        is_said = OVERLAP in self.sweep or "overlap" in self.raw["emulate"]
        is_said |= has_assumed_traffic(self.assumed)  # whose answers are a line each
        if not is_said and any(map(_may_overlap, asked)):
            self.sweep = {**self.sweep, OVERLAP: [NO_OVERLAP, TWO_BATCH]}


def _links_for(links: tuple[str, str], ep_size: int) -> str:
    """Of a device's links, inside a node and beyond it, those that so many ranks need."""
    inside, beyond = links
    return inside if ep_size <= load_links(inside).ranks_per_node else beyond


def _of_config(options: argparse.Namespace) -> _Draft:
    """A config's values and its sweep, without what ``advise`` decides by itself; its policies are no candidates."""
    _refuse(options, _FLAGS, "with a config, whose keys say that; --set KEY=VALUE changes one")
    raw, sweep = read_config(options.config.absolute(), options.overrides)
    for key in _OWN:
        section, _, name = key.rpartition(".")
        values = raw.get(section) if section else raw
        if isinstance(values, dict):
            values.pop(name, None)
    sweep = {key: values for key, values in sweep.items() if not key.startswith(_OWN)}
    return _Draft(options.config, raw, sweep, [], is_of_flags=False)


def _of_flags(options: argparse.Namespace) -> _Draft:
    """A config of the flags of ``--model``."""
    if options.model is None:
        raise UserError("expected a config, a results directory or --model; got none", where="advise")
    with naming("--model"):
        load_model(options.model)
    if options.ep is None:
        raise UserError("--ep: expected a number beside --model, got none")
    for one, other, why in (
        ("tokens", "decode_tokens", "the first counts a batch of prefill, the second a step of decode"),
        *((*pair, "each says how busy experts are") for pair in combinations(_TRAFFIC, 2)),
    ):
        given = [name for name in (one, other) if getattr(options, name) is not None]
        if len(given) == 2 or (one == "tokens" and not given):
            flags = f"--{one}, --{other}".replace("_", "-")
            raise UserError(f"{flags}: expected one of them, for {why}; got {'both' if given else 'none'}")
    decode = options.decode_tokens is not None
    tokens = options.decode_tokens if decode else options.tokens
    traffic: dict[str, Any] = {
        "sequence_length": 1 if decode else min(PROMPT_LENGTH, max(1, tokens // max(1, options.ep)))
    }
    if options.counts is not None:
        traffic["layer"] = None
    assumed: list[Assumption] = []
    if options.trace is not None:
        traffic, assumed = _recorded(options.trace, decode)
        decode = traffic["arrangement"] == "decode"
    preset = ModelSpec.preset_of(options.model)
    raw = {
        "name": "advise",
        "model": {"preset": preset} if preset else {"hf_config": str(Path(options.model).absolute())},
        "workload": {"kind": "synthetic", "num_tokens": tokens, "seed": 1, **traffic},
        **({"whole": {"context_length": CONTEXT_LENGTH}} if decode else {}),
    }
    sweep: dict[str, Any] = {}
    values = {key: getattr(options, flag) for flag, key in _KEYS.items()}
    given = [f"{key}={json.dumps(value, default=str)}" for key, value in values.items() if value is not None]
    override(raw, sweep, [*given, *options.overrides])
    workload = raw["workload"]
    if is_open := isinstance(workload, dict) and workload.get("layer", "all") is None:
        workload["layer"] = "all"
    is_open &= "workload.layer" not in sweep
    return _Draft(Path(CONFIG_NAME), raw, sweep, assumed, is_of_flags=True, chooses_layers=is_open)


def _recorded(path: Path, decode: bool) -> tuple[dict[str, Any], list[Assumption]]:
    """The workload of a recording, of layers that nobody has named yet, and what is assumed."""
    with naming("--trace", " (counts of experts go as --counts FILE)"):
        trace = open_trace(path)
    is_of_decode = trace.stage == "decode"
    found: dict[str, Any] = {
        "kind": "recorded",
        "layer": None,
        "arrangement": "decode" if decode or is_of_decode else "sequences",
        "tail": "recorded" if trace.has_full_scores else "popularity",
    }
    assumed = []
    if trace.scores_are_normalised:
        found["topk_share"] = _TOPK_SHARE
        scores = {"topk_share": _TOPK_SHARE, "scores_are_assumed": trace.scores_are_assumed}
        assumed.append(Assumption(kind="topk_share", **scores))
    if decode and not is_of_decode:
        assumed.append(Assumption(kind="decode_as_prompts"))
    if is_of_decode and not decode:
        assumed.append(Assumption(kind="tokens_are_requests"))
    return found, assumed


def _find_rows(asked: Sequence[Experiment], name: str, *, of_links: bool) -> None:
    """Look for what others measured of every layer that is asked about.

    Raises:
        NoRowsError: there is none.
    """
    for experiment in asked:
        model, ep_size, layer = experiment.model.spec(), experiment.virtual_ranks, experiment.layer
        dtype, sms = layer.dtype or model.checkpoint_dtype, experiment.emulate.exchange_sms
        if of_links:
            load_links_of_layer(name, model, ep_size, dtype, sms, layer.dispatch_dtype, decodes=experiment.decodes)
        else:
            load_device_of_layer(name, model, ep_size, dtype, "pair" if experiment.decodes else "rank")


def _is_skewed(workload: SyntheticConfig | RecordedConfig) -> bool:
    """Something says how busy experts are."""
    if isinstance(workload, RecordedConfig):
        return True
    return any([workload.skew, workload.skew_from, workload.peak_load, workload.batch_peak_load, workload.balanced])


def _may_overlap(experiment: Experiment) -> bool:
    """Ranks exchange rows, of a batch that has halves, on a device that says what an exchange holds of it."""
    device = DEVICE if experiment.emulate.device == MEASURED else experiment.emulate.device
    halves = experiment.workload.total_tokens(experiment.virtual_ranks) >= 2 * experiment.virtual_ranks > 2
    with naming(keys=["emulate.device"]):
        return halves and load_device(device).num_sms is not None


def _is_drawn(experiment: Experiment) -> bool:
    """Whether more draws say more: not of counted experts, which have their places, nor of a whole model's layers."""
    is_lone = experiment.scope == "layer" and experiment.workload.layer is None
    return is_lone and is_drawn(experiment, experiment.virtual_ranks)


# ---- candidates ------------------------------------------------------------------------------------------------------


def _table(model: ModelSpec, bounds: Bounds) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Every candidate: what it needs, the config's key that takes it, and its entry there.

    These are the four papers' policies at their usual settings, ``budget_drop`` at the user's bounds, and what loses
    nothing. Settings in experts are those of the papers' models, scaled to this one's experts and top-k. Rules that a
    paper only compares with (``pruned``, ``expert_drop``, ``load_only``) are no candidates.
    """
    num_experts, top_k = model.num_experts, model.top_k
    few, eighth, quarter = (max(1, num_experts // part) for part in (32, 8, 4))
    spare = {"spare_per_rank": 1}
    yield "", "policies", {"name": "token_drop", "capacity_factor": [1.0, 1.5, 2.0]}
    yield "", "policies", {"name": "token_drop", "capacity_factor": 1.0, "granularity": "device"}
    yield "scores", "policies", {"name": "expanded_drop", "capacity_factor": [1.0, 1.5, 2.0]}
    yield "decode scores", "policies", {"name": "oea", "k0": sorted({-(-3 * top_k // 8), -(-5 * top_k // 8)})}
    yield "scores", "policies", {"name": "laser", "eps_high": 0.6, "t_fix": 0.3, "c": min(2 * top_k, num_experts)}
    yield "decode scores", "policies", {"name": "xshare", "k0": 1, "budget": [eighth, quarter]}
    yield "decode scores", "policies", {"name": "xshare", "k0": 1, "scope": "rank", "rank_budget": few}
    yield "decode scores requests", "policies", {"name": "xshare", "k0": 1, "scope": "request", "request_budget": few}
    for key, budget in (("max_dropped", bounds.max_dropped), ("max_lost_mass", round(1 - bounds.min_retained, 6))):
        if 0 < budget < 1:
            yield "", "policies", {"name": "budget_drop", key: budget}
    yield "ranks", "replication", {**spare}
    yield "ranks", "replication", {**spare, "balancer": "lp"}
    yield "ranks decode", "replication", {**spare, "balancer": "activated"}
    yield "ranks", "replication", {**spare, "plan": "variance"}
    yield "ranks prefill", "rebalance", {"name": "llep"}
    yield "ranks prefill", "rebalance", {"name": "ultra"}
    if model.shared_ffn_hidden_size:
        yield "ranks", "rebalance", {"name": "waterfill"}


def candidates(
    experiments: Sequence[Experiment], bounds: Bounds
) -> tuple[dict[str, list[dict[str, Any]]], list[Assumption]]:
    """The candidates that can act here, by key of the config, and those that cannot, by what they lack."""
    workloads = [experiment.workload for experiment in experiments]
    decodes = any(one.decodes for one in experiments)
    lacking: dict[Need, bool] = {  # the first that counts
        "ranks": any(one.layer.ep_size == 1 or one.scope == "model" for one in experiments),
        "decode": not decodes,
        "prefill": decodes,
        "scores": any(isinstance(one, RecordedConfig) and one.tail != "recorded" for one in workloads),
        "requests": any(one.request_tokens == 1 for one in workloads),
    }
    kept: dict[str, list[dict[str, Any]]] = {"policies": [], "replication": [], "rebalance": []}
    left_out: dict[Need, dict[str, None]] = {}
    for needs, key, entry in _table(experiments[0].model.spec(), bounds):
        why: Need | None = next(
            (need for need, is_lacking in lacking.items() if is_lacking and need in needs.split()), None
        )
        if why is None:
            kept[key].append(entry)
        else:
            left_out.setdefault(why, {})[entry.get("name", entry.get("balancer", "eplb"))] = None
    return kept, [Assumption(kind="left_out", names=list(names), need=need) for need, names in left_out.items()]
