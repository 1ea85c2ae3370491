"""What has to be known to read a comparison's numbers: sentences, and the facts that fill them.

A sentence stands where its fact holds: neither missing nor zero nor empty. Of a list a line stands for each entry, a
tuple fills several braces. Warnings come last.

Tables of other modules, of two runs side by side and of papers' claims have their sentences here too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from operator import attrgetter
from typing import Any

import pandas as pd

from moe_ep_bench.analysis.cases import CASE, COMPARISON, cases, routing
from moe_ep_bench.analysis.columns import SAME_KERNELS
from moe_ep_bench.analysis.store import KINDS, Comparison, Store
from moe_ep_bench.facts import ComparisonFacts, Conditions, JudgedFacts, PeakLoads, ServedFacts, TimedFacts
from moe_ep_bench.facts.words import (
    Line,
    component_words,
    fit_words,
    graph_words,
    peak_words,
    rest_words,
    skew_words,
    spare_words,
)
from moe_ep_bench.machine.monitor import Capped, Disturbance, capped, disturbances
from moe_ep_bench.timing.statistics import LEVEL, MIN_BATCHES

# Aims of the timing protocol: above these a breakdown is told apart from what it breaks down.
MAX_UNACCOUNTED = 0.01
MAX_PROBE_OVERHEAD = 0.01
# A share of launch-bound iterations below this is chance.
MAX_HOST_BOUND = 0.1
# Clocks of cases that differ by less are alike.
MAX_CLOCK_DIFFERENCE = 0.01
# Pairs cancel a drift that is slow against them; beyond this it is worth a warning.
MAX_DRIFT = 0.1
# What drops more of the top-k pairs does next to nothing: at few tokens a capacity may come to no row at all.
MOST_DROPPED = 0.95
# A step of decoding leaves this share of the fullest rank's experts idle in some case.
_MOST_BUNCHED = 1.5  # tokens at one moment
_LEAST_IDLE = 0.05

FEW_BATCHES = f"fewer than {MIN_BATCHES} batches give no interval, and so no verdict"

MODEL_CAVEAT = "ranges in brackets cover traffic, not the error of the model of devices and links"
TORCH_CAVEAT = "{}: torch operations, modelled as if compiled; on a GPU they take longer"
OVERSUBSCRIBED = "more ranks than cores: they share time slices, and no straggler speedup is claimed"
PROBES_COST = "probes cost up to {:.1f} %: read phase times as shares; speedups come from iterations without probes"
NOT_FUSED = "permutation is not fused: do not compare phase shares with a paper's"
ONE_DRAW = "busy experts were placed on ranks at random once; other seeds give other placements (sweep workload.seed)"
NO_TIMES = "loads are no times, and no speed is claimed"
READING = "loads, activated experts and traffic include computed padding; drops and mass kept cover valid tokens only"

# A sentence with braces, and what fills them.
Note = tuple[str, Any]


def warnings(store: Store) -> list[Line]:
    """The warnings of all comparisons, each once: what voids a result first, whichever comparison it is of."""
    routed = (one for one in store.comparisons if one.run.mode != "quality")
    lines = [line for one in routed for line in notes(store, one.directory, one.comparison_id)]
    found = sorted((line for line in lines if line.is_warning), key=attrgetter("place"))
    return list({line.text: line for line in found}.values())


@lru_cache(maxsize=256)
def notes(store: Store, directory: str, comparison_id: str) -> list[Line]:
    """What has to be known to read a comparison's numbers, a sentence each; warnings last."""
    one, frame = store.by_id[directory, comparison_id], cases(store)
    rows = frame[frame[COMPARISON].eq([directory, comparison_id]).all(axis=1)]
    ok = rows[rows["status"] == "ok"]
    if isinstance(one.facts, ServedFacts):
        said, weak = _of_servers(one.facts, rows, ok), _weak_servers(one.facts, ok)
        return _sentences(said, weak)
    is_timed = KINDS[one.run.mode].is_timed
    said = _of_routing(store, one, rows, ok) + (_of_times(one, rows, ok) if is_timed else [])
    weak = (_weak_times(one, rows, ok) if is_timed else []) + _weak_scores(one, rows, ok)
    weak += _weak_phases(one, rows) if is_timed else []
    return _sentences(said, weak)


def _sentences(said: Sequence[Note], weak: Sequence[Note]) -> list[Line]:
    """Lines of what is said and of what is warned of."""
    return [
        Line(text, is_warning, place)
        for is_warning, sentences in ((False, said), (True, weak))
        for place, note in enumerate(sentences)
        for text in _lines(*note)
    ]


def _lines(sentence: str, fact: Any) -> Iterator[str]:
    """The sentence's lines; none where the fact does not hold."""
    for entry in fact if isinstance(fact, list) else [fact]:
        values = entry if isinstance(entry, tuple) else (entry,)
        if all(value == value and value is not None for value in values) and (len(values) > 1 or any(values)):
            yield sentence.format(*values)  # NaN is unequal to itself


def _of(ok: pd.DataFrame, role: str) -> pd.DataFrame:
    return ok[ok["role"] == role]


def _beyond(value: float, most: float) -> bool:
    """Above a limit by more than rounding; of NaN False."""
    return value > most and not math.isclose(value, most, rel_tol=1e-9)


def _most(rows: pd.DataFrame, column: str, *, key: Callable[[float], float] | None = None) -> float:
    """The largest value of a column, by ``key``; NaN where there is none."""
    values = rows[column].dropna().astype(float) if column in rows else ()
    return max(values, key=key, default=float("nan"))


# ---- what is said ----------------------------------------------------------------------------------------------------


def _of_routing(store: Store, one: Comparison, rows: pd.DataFrame, ok: pd.DataFrame) -> list[Note]:
    facts, padding = one.facts, 0.0
    if facts.workload.padding:
        batches = routing(store).merge(_of(ok, "baseline")[CASE], on=CASE)
        padding = 100 * batches["padding_pairs"].sum() / batches["num_pairs"].sum()
    peaks = PeakLoads.of(facts.workload, _of(ok, "baseline")["fullest_expert"].mean())
    is_assumed = not isinstance(facts, TimedFacts) and facts.workload.scores_assumed
    budgets = rows[rows["spare_by_layer"].notna()]
    return [
        ("{}", rows["workload_words"].iloc[0]),
        ("{}", peaks and peak_words(peaks)),
        ("{}", layers_words(facts)),
        (
            "each batch is a sample of {:,} tokens, each standing for {}: the fullest rank's load is known to {:.1f} % "
            "(three standard errors)",
            _sampled(facts, _of(ok, "baseline")),
        ),
        (
            "of each batch {:,} tokens of {} ranks were drawn, each in place of {}: experts' loads are those of "
            "all to {:.1f} % of the mean",
            _matched(facts),
        ),
        (
            "{}: {}",
            [
                (label, spare_words(spare, layers))
                for label, spare, layers in budgets[["label", "spare_by_layer", "spare_layers"]].itertuples(index=False)
            ],
        ),
        (ONE_DRAW, bool(rows["is_one_draw"].iloc[0]) and not facts.workload.is_one_draw),
        (f"{READING}; native spends {{:.1f}} % of its pairs on it", padding),
        (
            "scores were not recorded and are assumed equal over the top-k: loads are the recording's, but mass, and "
            "what policies choose by scores (oea, xshare, drops by score), do not describe the model",
            is_assumed,
        ),
    ]


def _sampled(facts: ComparisonFacts, native: pd.DataFrame) -> tuple[int, int, float] | None:
    """Tokens that were routed, for how many each stands, and the percent to which they tell the fullest rank's load.

    Pairs come to a rank by chance, so that of n in the sample, of f times as many in all, the standard error is
    sqrt((1 - 1 / f) / n).
    """
    if facts.sample_tokens is None or facts.sample_tokens >= facts.num_tokens:  # as a stranger's file may say
        return None
    if facts.sample_ranks is not None:
        return None
    stands_for = facts.num_tokens // facts.sample_tokens
    pairs = native["fullest_rank"].mean() * facts.sample_tokens * facts.top_k / facts.num_ranks
    return facts.sample_tokens, stands_for, 300 * math.sqrt((1 - 1 / stands_for) / pairs)


def _matched(facts: ComparisonFacts) -> tuple[int, int, int, float] | None:
    """Tokens that were routed, the ranks that have them, for how many each stands, and how far loads are from those.

    They are solved for to two pairs of each expert in each half (``workload.synthetic``).
    """
    if facts.sample_tokens is None or facts.sample_ranks is None:
        return None
    stands_for = facts.num_tokens // facts.sample_tokens
    percent = 100 * 4 * facts.num_experts / (facts.sample_tokens * facts.top_k)
    return facts.sample_tokens, facts.sample_ranks, stands_for, percent


def layers_words(facts: ComparisonFacts) -> str:
    """How far the layers differ that a named skew stands for; empty where that is not known."""
    skew = facts.workload.skew
    return skew_words(skew.layers) if skew is not None and skew.layers is not None else ""


def _of_times(one: Comparison[TimedFacts], rows: pd.DataFrame, ok: pd.DataFrame) -> list[Note]:
    facts, ran, rest = one.facts, one.facts.device is None, one.facts.rest
    launches = [one.conditions[launch] for launch in sorted(one.conditions)]
    parts = {"experts": facts.experts, "permutation": facts.permute, "routing": facts.kernel if ran else None}
    by_torch = ", ".join(ok.loc[ok["by_torch"].eq(True), "label"])
    judged = rows[~rows["role"].isin(["baseline", "noise"]) & rows["floor_low"].notna()]
    detectable = _of(ok, "policy")["detectable"].dropna()
    timed = "end to end: slowest rank's pass" if facts.whole else "speedup: slowest rank's layer time"
    return [
        ("{}", "; ".join(f"{name}: {component_words(part)}" for name, part in parts.items() if part)),
        (
            "{} independent EP groups: times and loads are means over them; slowest EP group takes longest in "
            "each iteration",
            ran and facts.num_replicas > 1 and facts.num_replicas,
        ),
        (
            "pass ms, tokens/s/GPU: each of {} MoE layers takes as long as this one, and the rest of the model {:,.0f} "
            "us a layer (modelled{})",
            not facts.whole
            and rest
            and (rest.num_moe_layers, rest.us_per_moe_layer, (of := rest_words(rest)) and f", {of}"),
        ),
        (MODEL_CAVEAT, not ran),
        (TORCH_CAVEAT, not ran and by_torch),
        ("replayed from CUDA graphs, which hold {}", graph_words(facts)),
        (f"{{}}, native over case, median of pairs {_spread(one)}", timed),
        (
            "noise floor: {:.3f} to {:.3f}, the difference between native and native run again",
            ran and (_most(rows, "floor_low"), _most(rows, "floor_high")),
        ),
        (
            "smallest speedup that this run can detect (power 80 %): {:.3f} to {:.3f}",
            len(detectable) > 0 and not facts.whole and (detectable.min(), detectable.max()),
        ),
        ("{}", chance_words(int(judged["speedup_is_interval"].eq(True).sum()))),
        ("{}", list(dict.fromkeys(power_words(capped([of for _, of in launch.machines])) for launch in launches))),
        ("median SM clock before the iterations of each case, MHz: {}", _clock_words(ok)),
        (
            "MoE share f, MoE speedup s: of breakdown iterations; by Amdahl: 1 / (1 - f + f / s) with native's f; no "
            "policy exceeds 1 / (1 - f) = {:.3f}",
            _most(rows, "most_by_amdahl"),
        ),
    ]


def _of_servers(facts: ServedFacts, rows: pd.DataFrame, ok: pd.DataFrame) -> list[Note]:
    words = "random words" if facts.prompts is None else facts.prompts
    judged = rows[~rows["role"].isin(["baseline", "noise"]) & rows["speedup_is_interval"].eq(True)]
    starts = f", and Student's t over {facts.num_starts} starts" if facts.num_starts > 1 else ", of this start only"
    spread = f"[95 % interval, bootstrapped over rounds, then requests{starts}]"
    spread = spread if facts.num_batches >= MIN_BATCHES else f"(min..max: fewer than {MIN_BATCHES} rounds)"
    salted = "cache_salt keeps vLLM's prefix cache from answering, another server's may"
    cache = salted if facts.cache_salt else "without cache_salt, its prefix cache may answer"
    how = {
        "together": "all servers were up, and rounds went from one to the next",
        "in_turn": "servers were up one after another, so that pairs are minutes apart",
    }
    return [
        (f"prompts: {words}, answers of at most {{:,}} tokens, temperature 0", facts.max_tokens),
        ("native: the server without the plugin; {}", facts.url is None and how[facts.servers]),
        ("one server, at {}; native again is the same one, asked the same: {}", facts.url and (facts.url, cache)),
        ("speedup: native over case, median of pairs of the same request {}", spread),
        (
            "noise floor of a request: {:.3f} to {:.3f}, the difference between native and native again",
            (_most(rows, "floor_low"), _most(rows, "floor_high")),
        ),
        (
            "equal: share of answers that are native's; first difference: the token at which the others differ first "
            "(median); a busy server rounds by what shares a step, as native again shows",
            True,
        ),
        ("{}", chance_words(4 * len(judged))),
    ]


def _weak_servers(facts: ServedFacts, ok: pd.DataFrame) -> list[Note]:
    native, again = _of(ok, "baseline"), _of(ok, "noise")
    unlike, short = ok[ok["other_length_share"] > 0], ok[ok["shortest"] < facts.max_tokens]
    return [
        ("native's server was not measured, so there are no speedups", native.empty),
        (
            "native was not measured a second time, so there is no noise floor and no verdict",
            len(native) > 0 and again.empty,
        ),
        (
            "native differs from itself: something differs from server to server; the floor covers it",
            native_differs(again),
        ),
        (
            "answers are not as long as native's, so whole requests have no verdict (TTFT, TPOT and tokens/s have): {}",
            ", ".join(f"{row['label']} {100 * row['other_length_share']:.0f} %" for row in unlike.to_dict("records")),
        ),
        (
            "answers are shorter than {} tokens, though ignore_eos was asked: {}",
            facts.ignore_eos and len(short) > 0 and (facts.max_tokens, ", ".join(short["label"])),
        ),
        (
            "answers came in bunches of {:.1f} tokens (median of a case): the server or something on the way holds "
            "pieces back, so TTFT is the first bunch's and TPOT is too short",
            (bunch := ok["bunch"].max()) > _MOST_BUNCHED and bunch,
        ),
    ]


def _spread(one: Comparison[TimedFacts]) -> str:
    """What stands beside a speedup: its interval, or the ends of its samples."""
    num_launches, draws, layers = len(one.conditions), one.facts.draws, one.facts.layers
    if one.facts.num_batches < MIN_BATCHES:
        return f"(min..max: {FEW_BATCHES})"
    launches = f", and Student's t over {num_launches} launches" if num_launches > 1 else ", of this launch only"
    launches = f", and Student's t over {layers} layers" if layers > 1 else launches
    launches = f", and Student's t over {draws} draws of the traffic" if draws > 1 else launches
    return f"[95 % interval, bootstrapped over batches, then iterations{launches}]"


# ---- what is warned of -----------------------------------------------------------------------------------------------


def _weak_times(one: Comparison[TimedFacts], rows: pd.DataFrame, ok: pd.DataFrame) -> list[Note]:
    """What voids a result first: the end of a run shows the first three."""
    facts, native = one.facts, _of(ok, "baseline")
    launches: list[Conditions] = [one.conditions[launch] for launch in sorted(one.conditions)]
    changes = [launch.warm_up.change for launch in launches if not launch.warm_up.settled]
    drift, bound = _most(rows, "drift", key=abs), _most(rows, "host_bound_share")
    bound = 100 * bound if facts.backend == "nccl" and bound > MAX_HOST_BOUND else None
    return [
        (
            "disturbed machine: {}",
            list(dict.fromkeys(disturbance_words(one) for launch in launches for one in disturbances(launch.machines))),
        ),
        (
            "warm-up did not settle: its last round differs by {} from the round before",
            [f"{100 * change:+.1f} %" for change in changes if change is not None],
        ),
        (
            "{} ran at an SM clock {:+.1f} % off native's SM clock: part of its speedup is the clock",
            _other_clocks(ok, native),
        ),
        (
            "times drifted by {:+.1f} % between the beginning and the end of a launch",
            _beyond(abs(drift), MAX_DRIFT) and 100 * drift,
        ),
        (
            "the recording has {:,} tokens, and a batch takes {:,} of it: it repeats them {:.3g} times, so batches are "
            "alike and intervals too narrow",
            _repeated(one),
        ),
        (
            "native differs from itself: something drifts with the order of cases; the floor covers it",
            native_differs(_of(ok, "noise")),
        ),
        (
            "launch-bound: in up to {:.1f} % of a case's iterations the host took longer to launch the work than the "
            "device to run it; its time is the host's, without waits for the device",
            bound,
        ),
        (
            "the host waits for the GPU in operations that are not timed ({}): part of the host's time may be waiting",
            _unclocked(ok, launches),
        ),
        ("the baseline was not measured, so there are no speedups", native.empty),
        (
            "native was not measured a second time, so there is no noise floor and no verdict",
            len(native) > 0 and rows["floor_low"].isna().all(),
        ),
        (OVERSUBSCRIBED, facts.oversubscribed),
        ("{}", facts.fit and fit_words(facts.fit)),
    ]


# The CPU's have no share of the host: a rank may be bound to some of its cores, and others work on any.
_TAKEN = "{} {cores:.2f} cores of {where} while it was timed (a rank may use {num_cores})"
_SLOWED = "rank {where}'s GPU was slowed down by {} in {percent:.3g} % of the samples"
_DISTURBED = {
    "processes": (_TAKEN, "other processes used"),
    "hypervisor": (_TAKEN, "the hypervisor took"),
    "hw_thermal": (_SLOWED, "heat"),
    "sw_thermal": (_SLOWED, "heat"),
    "hw_power_brake": (_SLOWED, "the brake of its power supply"),
    "hw_slowdown": (_SLOWED, "its hardware (heat or power)"),
}


def disturbance_words(one: Disturbance) -> str:
    sentence, what = _DISTURBED[one.kind]
    return sentence.format(what, percent=100 * one.share, **one._asdict())


def power_words(held: Capped | None) -> str:
    """How often the slowest GPU was held back by its power limit, and its clocks; empty where none was."""
    if held is None:
        return ""
    low, median, high = held.clock_mhz
    words = f"SM clock {low:,.0f} to {high:,.0f} MHz, median {median:,.0f}"
    if held.num_gpus > 1:
        words += f"; {held.num_capped} of {held.num_gpus} GPUs were capped, the fastest's median is"
        words += f" {held.fastest_mhz:,.0f}"
    return f"rank {held.rank}'s GPU was power-capped in {100 * held.share:.3g} % of the samples: {words}"


def _clock_words(ok: pd.DataFrame) -> str:
    """The GPU's clock of every case, side by side; of modelled ones, and on the CPU, there is none."""
    known = ok[ok["sm_clock_mhz"].notna()]
    return ", ".join(f"{row.label} {row.sm_clock_mhz:,.0f}" for row in known.itertuples())


def _other_clocks(ok: pd.DataFrame, native: pd.DataFrame) -> list[tuple[str, float]]:
    """Cases whose clock is not native's, by how much (%)."""
    difference = ok["sm_clock_mhz"] / native["sm_clock_mhz"].max() - 1
    far = difference.abs() > MAX_CLOCK_DIFFERENCE
    return list(zip(ok["label"][far], 100 * difference[far], strict=True))


def _unclocked(ok: pd.DataFrame, launches: Sequence[Conditions]) -> str:
    """Cases with the lines at which their host waits unseen."""
    places = {case_id: lines for launch in launches for case_id, lines in launch.unclocked.items()}
    found = ok[ok["case_id"].isin(list(places))]
    named = zip(found["label"], found["case_id"], strict=True)
    return "; ".join(f"{label}: {', '.join(places[case_id])}" for label, case_id in named)


def _repeated(one: Comparison) -> list[tuple]:
    """Recordings that a batch goes through more than once: their tokens, a batch's tokens of it, how many times."""
    recording = one.facts.workload.recording
    sources = recording.sources if recording else []
    of_each = one.facts.num_tokens // max(len(sources), 1)
    return [(of.num_tokens, of_each, of_each / of.num_tokens) for of in sources if of_each > of.num_tokens]


def native_differs(noise: pd.DataFrame) -> bool:
    """Whether the interval of native run a second time excludes that it is as fast as itself."""
    differs = (noise["speedup_low"] > 1) | (noise["speedup_high"] < 1)
    return bool((differs & noise["speedup_is_interval"].eq(True)).any())


def _weak_scores(one: Comparison, rows: pd.DataFrame, ok: pd.DataFrame) -> list[Note]:
    """What does next to nothing, data of another model by which a policy decides, and scores that are modelled."""
    model, policies, tail = one.facts.model, _of(ok, "policy"), one.facts.workload.tail_model
    used = rows[["policy", "data_model"]].dropna().drop_duplicates().itertuples(index=False)
    looking = ", ".join(policies.loc[policies["looks_past_top_k"].astype(bool), "label"])
    idle = policies[policies["dropped_share"] > MOST_DROPPED]
    return [
        (
            f"more than {100 * MOST_DROPPED:.0f} % of the pairs are dropped, so that next to nothing is computed: {{}}",
            ", ".join(idle["label"]),
        ),
        (
            "data: {} uses data of {}, not of {}",
            [(policy, of, model) for policy, of in used if not is_same_model(of, model)],
        ),
        (
            "scores past the recorded top-k are modelled ({} tail), and {} decided by them (sweep workload.tail)",
            looking and tail and (tail, looking),
        ),
    ]


def is_same_model(named: str, model: str) -> bool:
    """Whether a file's name for a model means this one: case, signs and the hub's owner aside, one holds the other."""
    of_file, own = ("".join(filter(str.isalnum, name.rpartition("/")[2].lower())) for name in (named, model))
    return of_file in own or own in of_file


def _weak_phases(one: Comparison[TimedFacts], rows: pd.DataFrame) -> list[Note]:
    facts, overhead = one.facts, _most(rows, "probe_overhead")
    return [
        ("the layer is simpler than {}'s: {}", [(facts.model, departure) for departure in facts.departures]),
        (
            f"phases leave more than {100 * MAX_UNACCOUNTED:g} % of the time unaccounted for",
            _beyond(_most(rows, "breakdown_unaccounted_share"), MAX_UNACCOUNTED),
        ),
        (PROBES_COST, _beyond(overhead, MAX_PROBE_OVERHEAD) and 100 * overhead),
        (NOT_FUSED, facts.device is None and facts.permute.ran not in ("fused", "none")),
    ]


def leaves_idle(rows: pd.DataFrame) -> bool:
    """Whether activated experts say anything: some native or policy leaves experts of the fullest rank idle."""
    rows = rows[rows["role"].isin(["baseline", "policy"]) & rows["activated_fullest_rank"].notna()]
    held = rows["num_experts"] / rows["num_ranks"]
    return bool((rows["activated_fullest_rank"] <= (1 - _LEAST_IDLE) * held).any())


# ---- words of statistics ---------------------------------------------------------------------------------------------


def interval_words(is_interval: Sequence[bool], is_one_draw: Sequence[bool]) -> str:
    """What whiskers are: an interval, or the ends of the samples where batches are too few for one.

    Args:
        is_one_draw: whether one draw of the traffic is behind each, and nothing else says so.
    """
    few = f"fewer than {MIN_BATCHES} batches"
    of_one = [one for known, one in zip(is_interval, is_one_draw, strict=True) if known]
    interval = f"95 % interval{', one draw' if all(of_one) else ', some of one draw' if any(of_one) else ''}"
    if all(is_interval):
        return f"Whiskers: {interval}."
    if not any(is_interval):
        return f"Whiskers: smallest and largest pair ({few} give no interval)."
    return f"Whiskers: {interval}, or smallest and largest pair where there are {few}."


def chance_words(number: int) -> list[str]:
    """How many of many verdicts chance alone would give; nothing of a single one."""
    alpha = 1 - LEVEL
    if number < 2:
        return []
    return [
        f"if nothing differed, chance alone would call up to {number * alpha:.1f} of these {number} verdicts "
        f"({number} x {100 * alpha:.0f} %)"
    ]


# ---- two runs side by side -------------------------------------------------------------------------------------------

CHANGES = (
    "change: NEW over BASE [95 % interval], for native of its time, for other cases of their time over native's; "
    "floor: how far native differs from native again, both runs together"
)
BOTH_RANKS = "Emulated and real ranks"
ONE_LAUNCH = "one launch: intervals do not cover differences between jobs; several (measure.launches, serve.starts) do"
# Why a change has no verdict.
INCONCLUSIVE = {
    "other_length": "answers are not as long as native's",
    "no_ratio": "nothing to divide: no common batch, no native, or a time of 0",
    "few_batches": f"fewer than {MIN_BATCHES} batches give no interval",
    "oversubscribed": OVERSUBSCRIBED,
    "no_floor": "a run lacks its noise floor",
    "in_floor": "the interval lies partly in the noise floor",
}


OTHER_WORK = "{} {} {:.1f} % in BASE and {:.1f} % in NEW: not of the same work"
NATIVE_MOVED = "native itself became {} ({} %): the machine changed, or code that all cases share"
SLOWER = "slower by more than {:g} %, beyond noise: {}"
UNDECIDED = "undecided whether slower by more than {:g} %: {}"
OTHER_ROUTING = "routing is not the same in both runs: {}"
OTHER_THREADS = "each real rank computed with {} thread(s), the emulated one with {}"
EQUIVALENCE = (
    "equivalent: the whole 95 % interval of emulated over measured speedup lies within {} (two one-sided tests at "
    "2.5 %); different: all of it lies outside; the ratio is taken batch by batch"
)


def equivalent_words(of: str, counts: Mapping[str, int], margin: str, largest: float | None) -> str:
    """``k of n speedups are equivalent within m %; largest difference x %``, by verdict of one quantity."""
    line = f"{counts.get('equivalent', 0)} of {sum(counts.values())} {of} are equivalent within {margin}"
    others = [f"{counts[verdict]} {verdict}" for verdict in ("different", "inconclusive") if verdict in counts]
    line += f" ({', '.join(others)})" if others else ""
    return line + ("" if largest is None else f", largest difference {100 * largest:.1f} %")


# ---- answers, and papers' claims -------------------------------------------------------------------------------------


ANSWERS = "{}: answers of the whole model, routing of {} virtual ranks; not timed"


def entropy_words(num_batches: float) -> str:
    """What cross-entropy is set against, and its error."""
    interval = "with its 95 % interval, Student's t over batches, whose sequences were routed together"
    if num_batches < MIN_BATCHES:
        interval = f"no interval, and no verdict on claims, below {MIN_BATCHES} batches; got {num_batches:.0f}"
    return f"cross-entropy: added to the unpatched model's on the same sequences ({interval})"


ORDERINGS = (
    "A keeps at least as much of the answers as B, papers say; B costs more: nats per token; +-: "
    "95 % interval, Student's t over batches, of all checkpoints over their means"
)


def task_lines(facts: JudgedFacts | ServedFacts) -> list[str]:
    """Whose errors stand beside scores, and how tasks were asked."""
    how = (
        f"{facts.batch_size} requests are routed together, on {facts.num_ranks} virtual ranks; "
        "lost pairs and kept mass are of all passes of a task, over all layers; nothing was timed"
        if isinstance(facts, JudgedFacts)
        else f"{facts.task}: asked of live servers, of which native is the unpatched one; what a policy dropped is "
        "in its server's log"
    )
    lines = [
        "+-: standard errors over questions, of a difference to the unpatched model over the same ones, where the "
        "number is their mean; that requests of a batch share their routing is not in them",
        how,
    ]
    return lines if facts.limit is None else [*lines, f"the first {facts.limit:.0f} questions of each task only"]


UNCLAIMED = "the case or its baseline was not measured"
OURS = (
    "ours: mean over draws (seeds or recorded layers) of the traffic that was chosen beforehand; range: "
    "smallest to largest such mean of all traffics; draws: how many, the smallest and the largest; dropped, "
    "rerouted (together missing): shares of the top-k pairs, in %; rows with the largest disagreement come first"
)
OVER_TOPK = f"over topk: ours over topk, {SAME_KERNELS}, where native differs from it"
WHY_THEY_DIFFER = "Why they differ, and what was inferred"
NOT_CHOSEN = "the config's first traffic, for none was chosen beforehand"

CLAIMS_OF_LAYERS = "Papers' numbers and one layer here: {}"
CLAIMS_OF_MODELS = "Papers' numbers and whole models here, from end to end: {}"
