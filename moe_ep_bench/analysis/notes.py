"""What has to be known to read a comparison's numbers: a table of facts and the sentences that they fill.

A row of ``NOTES`` or ``WARNINGS`` stands where its fact holds: neither missing nor zero nor empty. Of a list a line
stands for each entry, a tuple fills several braces. Warnings forbid or weaken a reading; they come last and begin with
``warning:``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from operator import itemgetter
from typing import Any, NamedTuple

import pandas as pd

from moe_ep_bench.analysis.cases import CASE, COMPARISON, cases, kind_of, routing
from moe_ep_bench.analysis.origins import component_words, is_same_model
from moe_ep_bench.analysis.store import Comparison, Store
from moe_ep_bench.machine.monitor import disturbances
from moe_ep_bench.timing.statistics import LEVEL, MIN_BATCHES

# Aims of the timing protocol: above these a breakdown is told apart from what it breaks down.
MAX_UNACCOUNTED = 0.01
MAX_PROBE_OVERHEAD = 0.01
# A share of launch-bound iterations below this is chance.
MAX_HOST_BOUND = 0.1
# Pairs cancel a drift that is slow against them; beyond this it is worth a warning.
MAX_DRIFT = 0.1
# A step of decoding leaves this share of the fullest rank's experts idle in some case.
_LEAST_IDLE = 0.05
# Pairs of an expert, in the mean, of which chance alone makes a peak load of two.
_FEW_PAIRS = 8
WARNING = "warning: "

FEW_BATCHES = f"fewer than {MIN_BATCHES} batches give no interval, and so no verdict"

MODEL_CAVEAT = "ranges in brackets come from traffic alone: errors of the model of devices and links are not in them"
OVERSUBSCRIBED = "more ranks than cores: they share time slices, and no straggler speedup is claimed"
PROBES_COST = "probes cost up to {:.1f} %: read phase times as shares; speedups come from iterations without probes"
NOT_FUSED = "permutation is not fused: phase shares are not to be set beside a paper's"
READING = "loads, activated experts and traffic count padding that is computed; drops and mass kept are of valid tokens"


class About:
    """A comparison, its rows of ``cases``, and what both say together."""

    def __init__(self, store: Store, comparison: Comparison) -> None:
        frame = cases(store)
        self.store, self.facts = store, comparison.facts
        self.rows = frame[frame[COMPARISON].eq([comparison.directory, comparison.comparison_id]).all(axis=1)]
        self.launches = [comparison.conditions[launch] for launch in sorted(comparison.conditions)]
        self.kind = kind_of(self.rows)

    def of(self, role: str) -> pd.DataFrame:
        """The rows of a role that are ok."""
        return self.rows[(self.rows["role"] == role) & (self.rows["status"] == "ok")]

    def most(self, column: str, *, key: Callable[[float], float] | None = None) -> float:
        """The largest value of a column, by ``key``; NaN where there is none."""
        values = self.rows[column].dropna().astype(float) if column in self.rows else ()
        return max(values, key=key, default=float("nan"))

    @property
    def ran(self) -> bool:
        return self.facts.device is None


def _components(about: About) -> str:
    facts = about.facts
    parts = {"experts": facts.experts, "permutation": facts.permute, "routing": facts.kernel if about.ran else None}
    return "; ".join(f"{name}: {component_words(part)}" for name, part in parts.items() if part)


def _padding(about: About) -> float:
    batches = routing(about.store).merge(about.of("baseline")[CASE], on=CASE)
    return 100 * batches["padding_pairs"].sum() / batches["num_pairs"].sum()


def _spread(about: About) -> str:
    """What stands beside a speedup: its interval, or the ends of its samples."""
    facts, num_launches = about.facts, len(about.launches)
    if facts.num_batches < MIN_BATCHES:
        return f"(min..max: {FEW_BATCHES})"
    launches = f", and Student's t over {num_launches} launches" if num_launches > 1 else ", of this launch only"
    if facts.draws > 1:
        launches = f", and Student's t over {facts.draws} draws of the traffic"
    return f"[95 % interval, bootstrapped over batches, then iterations{launches}]"


def _detectable(about: About) -> tuple | None:
    values = about.of("policy")["detectable"].dropna()
    return (values.min(), values.max()) if len(values) else None


def _chance(about: About) -> list[str]:
    judged = about.rows[~about.rows["role"].isin(["baseline", "noise"]) & about.rows["floor_low"].notna()]
    return chance_words(int(judged["speedup_is_interval"].eq(True).sum()))


def _native_differs(about: About) -> bool:
    noise = about.of("noise")
    differs = (noise["speedup_low"] > 1) | (noise["speedup_high"] < 1)
    return (differs & noise["speedup_is_interval"].eq(True)).any()


def _host_bound(about: About) -> float | None:
    share = about.most("host_bound_share")
    return 100 * share if about.facts.backend == "nccl" and share > MAX_HOST_BOUND else None


def _of_machines(lines_of: Callable) -> Callable[[About], list[str]]:
    return lambda about: list(dict.fromkeys(line for launch in about.launches for line in lines_of(launch.machines)))


def _unsettled(about: About) -> list[str]:
    changes = [launch.warm_up.change for launch in about.launches if not launch.warm_up.settled]
    return [f"{100 * change:+.1f} %" for change in changes if change is not None]


def _wait_unlike_others(about: About) -> str:
    """Labels of the cases that wait, where others do not and are launch-bound."""
    rows = about.rows[about.rows["status"] == "ok"]
    waits = rows["case_id"].map(lambda case_id: any(launch.waits(case_id) for launch in about.launches))
    return "" if waits.all() or not _host_bound(about) else ", ".join(rows["label"][waits])


def _foreign_data(about: About) -> list[tuple]:
    """Policies that decide by data of another model than the comparison's, and whose these are."""
    used = about.rows[["policy", "data_model"]].dropna().drop_duplicates().itertuples(index=False)
    return [(policy, of, about.facts.model) for policy, of in used if not is_same_model(of, about.facts.model)]


def _tail(about: About) -> tuple | None:
    """The tail model of recorded scores, and what rests on it."""
    policies, tail = about.of("policy"), about.facts.workload.tail_model
    looking = ", ".join(policies.loc[policies["looks_past_top_k"].astype(bool), "label"])
    return (tail, looking) if looking and tail else None


def _repeated(about: About) -> list[tuple]:
    """Recordings that a batch goes through more than once: their tokens, a batch's tokens of it, how many times."""
    recording = about.facts.workload.recording
    sources = recording.sources if recording else []
    of_each = about.facts.num_tokens // max(len(sources), 1)
    return [(of.num_tokens, of_each, of_each / of.num_tokens) for of in sources if of_each > of.num_tokens]


def _by_chance(about: About) -> str:
    """What of native's fullest expert is chance, where a batch has too few pairs to show what was asked for."""
    facts = about.facts
    if facts.workload.kind != "synthetic" or facts.num_tokens * facts.top_k > _FEW_PAIRS * facts.num_experts:
        return ""
    peak, target = about.of("baseline")["fullest_expert"].mean(), facts.workload.targets.get("peak_load")
    if target is None:
        return f"no skew was asked for: native's fullest expert has {peak:.3g} x mean by chance, as few tokens have"
    return f"peak load {target:g}: the target of each batch, with what few tokens have by chance (native's: {peak:.3g})"


class Note(NamedTuple):
    """A sentence that a fact fills; ``of``: the comparisons that have it: layer, model, route."""

    of: str
    fact: Callable[[About], Any]
    sentence: str


_TIMED, _ALL = "layer model", "layer model route"
NOTES = (
    Note(_ALL, lambda about: about.rows["workload_words"].iloc[0], "{}"),
    Note(_ALL, _by_chance, "{}"),
    Note(_TIMED, _components, "{}"),
    Note(
        "layer",
        lambda about: (
            (rest := about.facts.rest) and (rest.num_moe_layers, rest.us_per_moe_layer, rest.of and f", {rest.of}")
        ),
        "pass ms, tokens/s/GPU: as if each of {} MoE layers took what this one does, beside {:,.0f} us a layer for the "
        "rest of the model (modelled{})",
    ),
    Note(_TIMED, lambda about: not about.ran, MODEL_CAVEAT),
    Note(_TIMED, lambda about: about.facts.cuda_graph, "replayed from CUDA graphs, which hold {}"),
    Note(
        _ALL,
        lambda about: about.facts.workload.padding and _padding(about),
        f"{READING}; native spends {{:.1f}} % of its pairs on it",
    ),
    Note("layer", _spread, "speedup: slowest rank's layer time, native over case, median of pairs {}"),
    Note("model", _spread, "end to end: slowest rank's pass, native over case, median of pairs {}"),
    Note(
        _TIMED,
        lambda about: about.ran and (about.most("floor_low"), about.most("floor_high")),
        "noise floor: {:.3f} to {:.3f}, by which native run twice differs from itself",
    ),
    Note("layer", _detectable, "smallest speedup that would be called (power 80 %): {:.3f} to {:.3f}"),
    Note(_TIMED, _chance, "{}"),
    Note(
        "model",
        lambda about: about.most("most_by_amdahl"),
        "MoE share f, MoE speedup s: of breakdown iterations; by Amdahl: 1 / (1 - f + f / s) with native's f; no "
        "policy exceeds 1 / (1 - f) = {:.3f}",
    ),
    Note(
        "model",
        lambda about: (whole := about.facts.whole).num_layers < whole.of_layers and (whole.num_layers, whole.of_layers),
        "cut: {} of {} layers were built and timed",
    ),
    Note(
        _TIMED,
        lambda about: about.facts.random_weights and about.rows["output_error"].notna().any(),
        "output error: relative to native, with random weights; it is no measure of a model's accuracy",
    ),
    Note(
        "route",
        lambda about: "scores assumed" in about.facts.workload.description,
        "scores were not recorded and are assumed equal over the top-k: loads are the recording's, but mass, and what "
        "policies choose by scores (oea, xshare, drops by score), say nothing of the model",
    ),
)
# What voids a result comes first, what only qualifies its phases last: the end of a run shows the first three.
WARNINGS = (
    Note(_TIMED, _of_machines(disturbances), "disturbed machine: {}"),
    Note(_TIMED, _unsettled, "warm-up did not settle: its last round took {} against the one before"),
    Note(
        _TIMED,
        lambda about: abs(drift := about.most("drift", key=abs)) > MAX_DRIFT and 100 * drift,
        "times drifted by {:+.1f} % between the begin and the end of a launch",
    ),
    Note(
        _TIMED,
        _repeated,
        "the recording has {:,} tokens, and a batch takes {:,} of it: it repeats them {:.3g} times, so batches are "
        "alike and intervals too narrow",
    ),
    Note(
        _TIMED,
        _native_differs,
        "native differs from itself: something drifts with the order of cases; the floor covers it",
    ),
    Note(
        _TIMED,
        _host_bound,
        "launch-bound: in up to {:.1f} % of a case's iterations the host issued work until the end; its time is the "
        "host's, not the device's",
    ),
    Note(
        _TIMED,
        _wait_unlike_others,
        "the host waits for the GPU within {}, and not within others: what it issues before that hides behind the "
        "hold, so that beside launch-bound cases they look faster, by 2 ms at most",
    ),
    Note(_ALL, _foreign_data, "data: {} decides by {}'s, not {}'s"),
    Note(_TIMED, lambda about: about.of("baseline").empty, "the baseline was not measured, so there are no speedups"),
    Note(
        _TIMED,
        lambda about: len(about.of("baseline")) and about.rows["floor_low"].isna().all(),
        "native was not measured a second time, so there is no noise floor and no verdict",
    ),
    Note(_TIMED, lambda about: about.facts.oversubscribed, OVERSUBSCRIBED),
    Note(_TIMED, lambda about: about.facts.fit and about.facts.fit.words, "{}"),
    Note(
        _ALL,
        _tail,
        "scores past the recorded top-k are modelled ({} tail), and what {} did rests on them (sweep workload.tail)",
    ),
    Note(
        _TIMED,
        lambda about: [(about.facts.model, departure) for departure in about.facts.departures],
        "simpler than {}'s: {}",
    ),
    Note(
        _TIMED,
        lambda about: about.most("breakdown_unaccounted_share") > MAX_UNACCOUNTED,
        f"phases leave more than {100 * MAX_UNACCOUNTED:g} % of the time unaccounted for",
    ),
    Note(
        _TIMED,
        lambda about: (overhead := about.most("probe_overhead")) > MAX_PROBE_OVERHEAD and 100 * overhead,
        PROBES_COST,
    ),
    Note(_TIMED, lambda about: about.ran and about.facts.permute.ran not in ("fused", "none"), NOT_FUSED),
)


def notes(store: Store, directory: str, comparison_id: str) -> list[str]:
    """What has to be known to read a comparison's numbers, a sentence each; warnings, last, begin with ``warning:``."""
    return [line for _, line in _ranked(store, directory, comparison_id)]


def warnings(store: Store) -> list[str]:
    """The warnings of all comparisons, each once, in the order of ``WARNINGS`` whichever comparison they are of."""
    ranked = (entry for one in store.comparisons for entry in _ranked(store, one.directory, one.comparison_id))
    lines = (line for _, line in sorted(ranked, key=itemgetter(0)))
    return list(dict.fromkeys(line for line in lines if line.startswith(WARNING)))


@lru_cache(maxsize=256)
def _ranked(store: Store, directory: str, comparison_id: str) -> list[tuple[int, str]]:
    """The lines of a comparison, each with its note's place in the tables."""
    about = About(store, store.by_id[directory, comparison_id])
    return [
        (place, line if place < len(NOTES) else WARNING + line)
        for place, note in enumerate((*NOTES, *WARNINGS))
        if about.kind in note.of.split()
        for line in _lines(note, note.fact(about))
    ]


def _lines(note: Note, fact: Any) -> Iterator[str]:
    """The note's lines; none where the fact does not hold."""
    for entry in fact if isinstance(fact, list) else [fact]:
        values = entry if isinstance(entry, tuple) else (entry,)
        if all(value == value and value is not None for value in values) and (len(values) > 1 or values[0]):
            yield note.sentence.format(*values)  # NaN is unequal to itself


def leaves_idle(rows: pd.DataFrame) -> bool:
    """Whether activated experts say anything: some native or policy leaves experts of the fullest rank idle."""
    rows = rows[rows["role"].isin(["baseline", "policy"])]
    held = rows["num_experts"] / rows["num_ranks"]
    return bool((rows["activated_fullest_rank"] <= (1 - _LEAST_IDLE) * held).any())


# ---- words of statistics ---------------------------------------------------------------------------------------------


def interval_words(is_interval: Sequence[bool]) -> str:
    """What whiskers are: an interval, or the ends of the samples where batches are too few for one."""
    few = f"fewer than {MIN_BATCHES} batches"
    if all(is_interval):
        return "Whiskers: 95 % interval."
    if not any(is_interval):
        return f"Whiskers: smallest and largest pair ({few} give no interval)."
    return f"Whiskers: 95 % interval, or smallest and largest pair where there are {few}."


def chance_words(number: int) -> list[str]:
    """How many of many verdicts chance alone would give; nothing of a single one."""
    alpha = 1 - LEVEL
    if number < 2:
        return []
    return [
        f"of {number} verdicts up to {number * alpha:.1f} would be called by chance alone, if nothing differed: "
        f"{number} x {100 * alpha:.0f} %"
    ]
