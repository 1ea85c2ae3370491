"""Numbers of docs/ that come from results/reference: each sentence below is made of its CSV, and stands in its page."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pandas as pd
import pytest
from gpu_pages import SEEN, SETTINGS, of_h100, of_h200

from moe_ep_bench.analysis.answer_costs import orderings_met
from moe_ep_bench.analysis.store import load
from moe_ep_bench.cli import main
from moe_ep_bench.cost_model.devices import Device
from moe_ep_bench.cost_model.links import Links
from moe_ep_bench.errors import OK

ROOT = Path(__file__).parent.parent
REFERENCE = ROOT / "results" / "reference"
FACTORS = ("2.0", "1.5", "1.0")


@cache
def table(name: str) -> pd.DataFrame:
    return pd.read_csv(REFERENCE / f"{name}.csv")


def cell(name: str, query: str, column: str) -> float:
    """The one number of a CSV's column where a condition holds."""
    (value,) = table(name).query(query)[column].unique()
    return value


def slashed(values: Iterable[float], form: str = ".2f") -> str:
    return " / ".join(f"{value:{form}}" for value in values)


# ---- docs/papers.md --------------------------------------------------------------------------------------------------


def claims(config: str, policy: str, metric: str, more: str = "") -> pd.DataFrame:
    """Rows of claims of policies whose label matches a pattern; of native where that is empty."""
    rows = table("papers-modelled").query(f"config == '{config}' and metric == '{metric}' {more}")
    return rows[rows["policy"].fillna("").str.fullmatch(policy)]


def ours(config: str, policy: str, metric: str = "speedup", more: str = "") -> float:
    """Under the traffic that was named beforehand."""
    return claims(config, policy, metric, more).query("primary")["ours"].mean()


def reach(config: str, policy: str, metric: str = "speedup", more: str = "", column: str = "ours") -> tuple[str, str]:
    """The least and the greatest under any traffic."""
    values = claims(config, policy, metric, more)[column]
    return f"{values.min():.2f}", f"{values.max():.2f}"


def token_drop(model: str) -> tuple[str, str, str]:
    """Figure 4: three factors under the named traffic, the least and the greatest under any."""
    config = "capacity-figure4-qwen" if model == "Qwen1.5-MoE" else "capacity-figure4"
    of = f"and source == 'Figure 4, {model}'"
    named = slashed(ours(config, f"token_drop capacity_factor={factor}", more=of) for factor in FACTORS)
    return named, *reach(config, r"token_drop .*", more=of)


def errors(model: str = "") -> pd.Series:
    figure = table("papers-modelled").query("primary and config.str.startswith('capacity-figure4')")
    return figure[figure["source"].str.startswith(f"Figure 4, {model}")]["difference"]


def measured(run: str) -> str:
    rows = "metric == 'speedup' and policy == 'token_drop capacity_factor="
    return slashed(cell(f"{run}-emulated/claims", f"{rows}{factor}'", "ours") for factor in FACTORS)


def of_papers() -> list[str]:
    olmoe, lite, mixtral, qwen = map(token_drop, ("OLMoE", "DeepSeek-V2-Lite", "Mixtral-8x7B", "Qwen1.5-MoE"))
    wholes = [("whole-capacity-mixtral", "and source.str.contains('one expert')"), ("whole-capacity-qwen", "")]
    at_15 = [ours(config, "token_drop capacity_factor=1.5", more=more) for config, more in wholes]
    most_at_15 = max(reach(config, r"token_drop .*", more=more)[1] for config, more in wholes)
    half = "token_drop capacity_factor=0.5", "speedup", "and source == 'OLMoE'"
    device = "expanded_drop capacity_factor=1.0 granularity=device"
    least, most = reach("whole-capacity-qwen3", device)[0], reach("capacity-qwen3", device)[1]
    batch = "and comparison.str.contains(' 16 tokens')"
    vanilla = ours("oea-table3", "native", "time_us", batch), claims("oea-table3", "native", "time_us", batch)["ours"]
    counts = claims("oea-table3", "native", "num_activated")
    activated = counts[counts["comparison"].str.contains(" 16 tokens")]
    steps = [f"num_tokens == 16 and label == 'oea k0={k0}'" for k0 in range(3, 8)]
    graph = [1 / cell("h100/decode_graph", step, "over_topk_median") for step in steps]
    most_k0 = {"oea-table3": 7, "oea-table5": 6}
    oea = [
        [f"{ours(config, f'oea k0={k0}', 'time', batch):.2f}" for k0 in (3, most)] for config, most in most_k0.items()
    ]
    tables10 = claims("capacity-table10", "token_drop .*", "speedup").query("primary")["ours"]
    laser = "laser eps_high=.* c="
    cuts = [ours("laser-mixtral", f"{laser}{c}", "imbalance_cut") for c in range(3, 7)]
    lite_cuts = [ours("laser-deepseek", f"{laser}{c}", "imbalance_cut") for c in (8, 10)]
    dropped = claims("capacity-experts-per-gpu", "token_drop .*", "missing_share")["ours"]

    def to(pair: Iterable[str]) -> str:
        return " to ".join(pair)

    return [
        f"| {mixtral[0]} (to {mixtral[2]}) |",
        f"| {olmoe[0]} ({to(olmoe[1:])}) |",
        f"| {lite[0]} ({to(lite[1:])}) |",
        f"| {qwen[0]} (to {qwen[2]}) |",
        f"| {at_15[0]:.2f}; {at_15[1]:.2f} (to {most_at_15}) |",
        f"| {ours('whole-capacity', *half):.2f} ({to(reach('whole-capacity', *half))}) |",
        f"| {ours('capacity-qwen3', device):.2f}; {ours('whole-capacity-qwen3', device):.2f} ({least} to {most}) |",
        f"| {vanilla[0]:.0f} ({vanilla[1].min():.0f} to {vanilla[1].max():.0f}) |",
        *(f"| {to(pair)} |" for pair in oea),
        f"| {tables10.min():.2f} to {tables10.max():.2f} ({to(reach('capacity-table10', 'token_drop .*'))}) |",
        f"| {to(reach('whole-xshare', 'xshare k0=1.*', 'time'))} |",
        f"| {to(reach('whole-xshare', 'xshare k0=0.*', 'time'))} |",
        f"| {to(reach('xshare-table4', 'xshare .*', 'time'))} |",
        f"off by {errors().abs().mean():.2f} on average, without Mixtral by "
        f"{errors()[~table('papers-modelled')['source'].str.contains('Mixtral')].abs().mean():.2f}: "
        f"DeepSeek-V2-Lite {errors('DeepSeek').mean():+.2f}, Mixtral {errors('Mixtral').mean():+.2f}, "
        f"OLMoE {errors('OLMoE').mean():+.2f}, Qwen1.5-MoE {errors('Qwen').mean():+.2f}.",
        f"OLMoE {measured('olmoe-h200')} (H200), DeepSeek-V2-Lite {measured('deepseek-v2-lite-h100')} (H100)",
        f"**{slashed(graph)}** of `topk`'s",
        f"| {100 * dropped.min():.1f} (to {100 * dropped.max():.1f}); "
        f"{100 * ours('capacity-figure4', 'token_drop .*', 'missing_share'):.1f} |",
        f"| {activated.query('primary')['ours'].item():.1f} ({activated['ours'].min():.1f} to "
        f"{activated['ours'].max():.1f}) | the paper's batches vary up to 16 tokens; 8 give "
        f"{counts.query('primary')['ours'].min():.1f} |",
        f"| {min(cuts):.2f} to {max(cuts):.2f} ({to(reach('laser-mixtral', f'{laser}[3-6]', 'imbalance_cut'))}) |",
        f"| {lite_cuts[0]:.2f}, {lite_cuts[1]:.2f} at c = 8, 10 "
        f"({to(reach('laser-deepseek', f'{laser}(8|10)', 'imbalance_cut'))}) |",
    ]


# ---- docs/balancing.md -----------------------------------------------------------------------------------------------

DOMAINS = ("intent", "summary", "translation")
LITE = [f"DeepSeek-V2-Lite, {domain}, 128 a rank" for domain in DOMAINS]
PREFILL = (*LITE, "GPT-OSS-20B, mixed, 512 a rank")
DECODE = "GPT-OSS-20B, decode, 8 a rank"
POWER_LAW = {tokens: f"gpt-oss-120b, power law 1.2, {tokens} a rank" for tokens in ("2,048", "16,384")}
TRAFFIC = {
    "DeepSeek-V2-Lite intent, 128": LITE[0],
    "GPT-OSS-20B, 512": PREFILL[-1],
    "GPT-OSS-20B decode, 8": DECODE,
    **{f"power law 1.2, {tokens}": traffic for tokens, traffic in POWER_LAW.items()},
}
BALANCE, BY_DEVICE = "balanced", "token_drop capacity_factor=1.0 granularity=device"
EPLB, VARIANCE = "EPLB, 1 spare per rank", "variance plan, 1 spare per rank"
ULTRA = [f"UltraEP ({solve_us} us to solve), 4 spare per rank" for solve_us in (0, 100)]
LP = [f"EPLB + LP ({solve_us} us to solve), 1 spare per rank" for solve_us in (0, 100)]
FEWEST = [f"EPLB + fewest activated ({solve_us} us to solve), 1 spare per rank" for solve_us in (0, 10, 100)]
BUDGET = [f"budget_drop max_lost_mass={mass}" for mass in (0.01, 0.05)]


def lossless(traffic: str) -> pd.DataFrame:
    rows = table("lossless").query("traffic == @traffic").set_index("label")
    return rows.assign(lost=1 - rows["retained_mass"])


def speed(traffic: str, label: str, *, star: bool = True, lost: bool = False, ends: bool = False) -> str:
    """A candidate's speedup as the page writes it: starred where it is no verdict, the mass lost, its interval."""
    row = lossless(traffic).loc[label]
    words = f"{row['speedup_median']:.2f}" + r"\*" * (star and row["verdict"] not in ("faster", "slower"))
    words += f" ({100 * row['lost']:.1f} %)" * lost
    return words + f" [{row['speedup_low']:.2f}, {row['speedup_high']:.2f}]" * ends


def best_drop(traffic: str) -> str:
    rows = lossless(traffic)
    return rows[rows.index.str.contains("drop") & (rows["lost"] <= 0.05)]["speedup_median"].idxmax()


def extremes(values: Iterable[float], form: str = ".2f") -> str:
    values = [f"{value:{form}}" for value in values]
    return f"{min(values, key=float)} to {max(values, key=float)}"


def fullest(planned_on: str, served: str) -> tuple[float, float, float]:
    """Of a rank, natively, by EPLB and by variance: the page's last table."""
    page = (REFERENCE / "lossless.md").read_text()
    (row,) = re.findall(rf"^\| {planned_on} \| {served} \| (.*) \|$", page, re.MULTILINE)
    return tuple(map(float, row.split(" | ")))


def slots(recording: str, mean: str) -> float:
    """Fullest rank with as many spare slots in every layer, held out."""
    page = (REFERENCE / "lossless.md").read_text()
    (alike,) = re.findall(rf"^\| {recording} \| {mean} \| ([\d.]+) \|", page, re.MULTILINE)
    return float(alike)


def of_shift() -> list[str]:
    """Traffic that moves at the twelfth batch: medians of the fullest rank, and what a new plan takes."""
    rows = table("traffic-shift").assign(moved=lambda rows: rows["batch"] >= 12)
    once, again = (f"EPLB, 1 spare per rank, window=4{more}" for more in ("", ", every=4, plan_ms=1.0"))
    fullest = rows.groupby(["label", "moved"])["rank_imbalance"].median().map("{:.2f}".format)
    new = rows[rows["label"] == again].iloc[0]
    taken = rows[rows["label"] == again].drop_duplicates("batch")[["rearranged_gib", "rearrange_ms"]].mean()
    return [
        f"at {fullest[once, False]} of the mean (native {fullest['native', False]})",
        f"at {fullest[once, True]} (native {fullest['native', True]}), new plans at {fullest[again, True]}.",
        f"here {taken['rearranged_gib']:.2f} GiB and {taken['rearrange_ms']:.2f} ms of a layer",
        f"the layer is {new['speedup_median']:.2f} times as fast as native",
    ]


def of_balancing() -> list[str]:
    rows = of_shift()
    for name, traffic in TRAFFIC.items():
        ultra = "-" if traffic == DECODE else ", ".join(speed(traffic, label) for label in ULTRA)
        plans = ", ".join(speed(traffic, label) for label in (EPLB, VARIANCE))
        drops = [speed(traffic, label, lost=True) for label in (BY_DEVICE, best_drop(traffic))]
        rows.append(f"| {name} | {speed(traffic, BALANCE)} | {plans} | {ultra} | {' | '.join(drops)} |")
    medians = [lossless(traffic)["speedup_median"].round(2) for traffic in PREFILL]
    filled = [lossless(traffic).loc["shared experts by water-filling", "speedup_median"] for traffic in LITE]
    gib = [lossless(traffic).loc[VARIANCE, "extra_gib_per_rank"] for traffic in PREFILL]
    small = [lossless(traffic).loc[label, "speedup_median"] for traffic in LITE for label in BUDGET]
    by_expert = [lossless(traffic).loc["token_drop capacity_factor=1.0"] for traffic in PREFILL]
    domains = [f"deepseek-v2-lite-{domain}" for domain in DOMAINS]
    others = [fullest(planned, served) for planned in domains for served in domains if planned != served]
    own, three = [fullest(domain, domain) for domain in domains], [fullest("all three domains", one) for one in domains]
    flash = fullest("gpt-oss-20b-mixed", "gpt-oss-20b-mixed")
    none, one = ([slots(domain, mean) for domain in domains] for mean in "01")
    gpt_oss = ", ".join(f"{slots('gpt-oss-20b-mixed', mean):.2f}" for mean in "01")
    half = [lossless(traffic).loc["EPLB, 0.5 spare per layer and rank", "speedup_median"] for traffic in LITE]
    llep = claims("llep-figure4", "LLEP .*", "speedup").query("source.str.contains('in')")
    more = llep["ours"] / llep["paper_low"] - 1
    balanced = ours("llep-figure4", "LLEP .*", more="and source == 'Figure 4, balanced'")
    ultra = "ultraep-imbalance", "UltraEP .*", "rank_imbalance"
    metro = [1 - claims("metro-decode", rf".*\({solve_us} us.*", "time")["ours"] for solve_us in (0, 10)]
    fewer = 1 - 1 / claims("metro-decode", "EPLB, .*", "activated_experts")["ours"]
    moved, wins = [speed(POWER_LAW[tokens], label, ends=True) for tokens, label in zip(POWER_LAW, ULTRA, strict=True)]
    dropped, loses = [speed(traffic, BUDGET[1], ends=True) for traffic in POWER_LAW.values()]
    lp = PREFILL[-1], LP[0]
    return [
        *rows,
        f"after SGLang: {extremes(filled)} times as fast |",
        f"within {extremes(of[BALANCE] - of[VARIANCE] for of in medians)} of `balanced` for {min(gib):.2f} to "
        f"{max(gib):.1f} GiB",
        f"gains {extremes(of[BY_DEVICE] - of[VARIANCE] for of in medians)} more, without memory",
        f"at {extremes(row[1] for row in others)} (native {extremes(row[0] for row in others)}) if planned on another "
        f"domain, at {extremes(row[1] for row in own)} on the same, at {extremes(row[1] for row in three)} on all "
        f"three; `variance` on all three at {extremes(row[2] for row in three)}.",
        f"leaves the fullest rank at {extremes(none)}, with one in each layer at {extremes(one)} (GPT-OSS: {gpt_oss}).",
        f"With `spare_budget: 0.5` a layer is {extremes(half)} times as fast.",
        f"dropping 4.9 % gains {dropped}, as much as `ultra` at 0 us, {moved}. At 16,384 `ultra` wins "
        f"even at 100 us, {wins} against {loses}.",
        f"it makes a layer slower ({extremes(small)}).",
        f"{extremes((row['speedup_median'] for row in by_expert), '.1f')} in prefill, for "
        f"{extremes((100 * row['lost'] for row in by_expert), '.0f')} % of the mass.",
        f"(GPT-OSS: {speed(*lp, star=False)} against {speed(PREFILL[-1], EPLB)})",
        "Under `activated` a layer is {} times as fast at 0 us, {} at 10, {} at 100.".format(
            *(speed(DECODE, label) for label in FEWEST)
        ),
        f"{100 * more.min():.0f} to {100 * more.max():.0f} % more: {extremes(llep['ours'])} (16 slots); balanced "
        f"{100 * (1 - balanced / 1.07):.0f} % less: {balanced:.2f} |",
        f"holds on drawn loads: {' to '.join(reach(ultra[0], 'native', ultra[2]))}, {' to '.join(reach(*ultra))} (EP",
        f"a layer is shorter by {extremes(100 * metro[0], '.0f')} % at 0 us, "
        f"{extremes((100 * metro[1]).round() + 0.0, '.0f')} % at 10"
        f"; {extremes(100 * fewer, '.0f')} % fewer activated experts |",
        f"| {100 * (1 - flash[2] / flash[1]):.0f} %: {flash[2]:.2f} against {flash[1]:.2f} |",
    ]


# ---- docs/quality.md -------------------------------------------------------------------------------------------------


def of_quality() -> list[str]:
    found = orderings_met(load(REFERENCE / "quality-small-2cpu")).set_index(["better", "worse"])
    alone = orderings_met(load(REFERENCE / "quality-small-seed0"))
    verdicts, numbers = found["verdict"].value_counts(), {4: "four"}
    pairs = {
        ("token_drop 1.0", "token_drop 1.0 order"): "order ({})",
        ("token_drop 1.0", "token_drop 1.0 random"): "random ({})",
        ("expanded_drop 1.0", "token_drop 1.0"): "Token Drop ({})",
        ("oea k0=1", "pruned k0=1"): "pruning ({})",
        ("laser eps_high=0.9 t_fix=0.5 c=8", "load_only"): "alone ({})",
    }
    costs = [found.loc[pair] for pair in pairs]
    return [
        f"Of {len(found)} pairs of cases in {found['claim'].nunique()} claims {verdicts['holds']} hold and "
        f"{numbers[verdicts['inconclusive']]} are inconclusive",
        *(
            words.format(f"{row['worse_costs_more']:.4f} ± {row['half_width']:.4f}")
            for words, row in zip(pairs.values(), costs, strict=True)
        ),
        f"Of all {len(alone)} pairs of the config, on seed 0 alone, "
        f"{numbers[(alone['verdict'] == 'does not hold').sum()]} do not hold",
    ]


# ---- docs/clusters.md ------------------------------------------------------------------------------------------------


def beside(source: str, *whats: str, form: str = ",.0f") -> str:
    """Published numbers, and ours, as two cells."""
    rows = table("clusters").query("source == @source").set_index("what").loc[list(whats)]
    return " | ".join("; ".join(f"{value:{form}}" for value in rows[column]) for column in ("published", "ours"))


def ways(kind: str, sizes: Iterable[int]) -> list[str]:
    return [f"{kind} {phase}, EP {size}" for phase in ("dispatch", "combine") for size in sizes]


def of_clusters() -> list[str]:
    found = table("clusters").query("not fitted and source != 'aiconfigurator'")
    errors = found.assign(error=found["error"].abs()).groupby("kind")["error"].agg(["size", "median", "max"])
    names = {"layer": "layers", "exchange": "exchanges", "experts": "experts", "model": "whole models"}
    one_sided = [f"{phase}, EP {size}, 2,048 tokens" for size in (8, 64) for phase in ("dispatch", "combine")]
    layers = ["all-to-all, fp8", "DeepEP, bf16", "DeepEP, fp8"]
    balance, ratio = "prefill, simulated balance", "prefill, simulated balance over as it was"
    return [
        *(
            f"| {names[kind]} | {row['size']:.0f} | {100 * row['median']:.0f} % | {100 * row['max']:.0f} % |"
            for kind, row in errors.iterrows()
        ),
        *(beside("megatron", *(f"{shape}, {of}" for of in layers), form=".2f")
          for shape in ("DeepSeek's shape", "Mixtral's")),
        *(beside("deepep", *ways("normal", [size])) for size in (8, 16, 32, 64)),
        *(beside("deepep", *ways("low latency", sizes)) for sizes in ((8,), (16, 32, 64), (128, 256))),
        beside("one-sided", *one_sided),
        beside("profile-data", "gate, up, down, expand and reduce", "expand", "reduce"),
        beside("blog04", "fullest rank with one slot a rank, where it has 2.56 without", form=".2f"),
        beside("lmsys", balance, "decode"),
        beside("lmsys", ratio, form=".2f"),
    ]  # fmt: skip


def of_readme() -> list[str]:
    found = table("clusters").query("not fitted and source != 'aiconfigurator'")
    error = {kind: 100 * rows["error"].abs() for kind, rows in found.groupby("kind")}
    layers, exchanges = error["layer"], error["exchange"]
    return [
        f"layers are off by {layers.max():.0f} % at worst; exchanges by {exchanges.median():.0f} % in the median, "
        f"{exchanges.max():.0f} % at worst"
    ]


# ---- docs/atlas.md ---------------------------------------------------------------------------------------------------


def of_atlas() -> list[str]:
    rows = table("atlas")
    assert not rows["kind"].eq("not asked").any(), "the page would have to say which"
    is_prefill, is_picked = rows["stage"] == "prefill", rows["speedup"].notna()
    of = {name: rows["traffic"] == name for name in ("balanced", "typical", "hard")}

    def times(is_one: pd.Series) -> str:
        found = rows[is_one & is_picked]["speedup"]
        return f"{found.min():.2f} to {found.max():.2f} times as fast, {found.median():.2f} in the median"

    def share(is_one: pd.Series, kind: str) -> str:
        return f"{(rows[is_one]['kind'] == kind).sum()} of {is_one.sum()}"

    def elsewhere(column: str) -> int:
        return int((rows[column] == "measured elsewhere").sum())

    clusters = table("clusters").query("not fitted and source != 'aiconfigurator'")

    def error(kind: str) -> str:
        found = 100 * clusters[clusters["kind"] == kind]["error"].abs()
        return f"{found.median():.0f} % in the median and {found.max():.0f} % at worst"

    drops = rows[rows["kind"] == "drop"]
    beside = rows[is_prefill & of["typical"] & (rows["kind"] == "replicate")].dropna(subset=["lossy_speedup"])
    ratio, dropped = (beside["lossy_speedup"] / beside["speedup"]).median(), beside["lossy_dropped_share"].median()
    of_mixtral = (drops["model"] == "mixtral-8x7b").sum()
    return [
        f"Native stays in {share(of['balanced'], 'nothing')} answers. "
        f"In {share(of['balanced'], 'drop').split()[0]} others a policy drops pairs",
        f"Replicas are picked in {share(is_prefill & of['typical'], 'replicate')} answers; a layer is "
        f"{times(is_prefill & of['typical'])}.",
        f"Replicas are picked in {share(is_prefill & of['hard'], 'replicate')} answers; a layer is "
        f"{times(is_prefill & of['hard'])}.",
        f"Under typical traffic native stays in {share(~is_prefill & of['typical'], 'nothing')} answers.",
        f"Under hard traffic it stays in {share(~is_prefill & of['hard'], 'nothing')}; elsewhere a layer is "
        f"{times(~is_prefill & of['hard'])}.",
        f"Drops are picked in {len(drops)} of {len(rows)} answers, {of_mixtral} of them for Mixtral",
        f"the fastest drop has {ratio:.2f} times their speed in the median, for {100 * dropped:.0f} % of the pairs",
        f"The time of experts was measured elsewhere in {elsewhere('experts')} of the {len(rows)} answers, that of "
        f"exchanges in {elsewhere('exchange')}",
        f"On six layers that others measured the model is off by {error('layer')}",
        f"layers are off by {error('layer').partition(' and ')[2]}.",
        f"on {len(clusters[clusters['kind'] == 'exchange'])} exchanges alone by {error('exchange')}",
    ]


# ---- docs/kernels.md -------------------------------------------------------------------------------------------------


KERNELS = ROOT / "moe_ep_bench" / "kernels"
FORMS = ("rows", "capacity", "budget", "sets", "laser", "decode_experts", "experts")


def of_kernels() -> list[str]:
    """Torch, Triton and the gain, of decode and of prefill."""
    found = table("h100/policies_gpu").set_index(["what", "num_tokens"])

    def gain(policy: str, num_tokens: int) -> str:
        row = found.loc[(policy, num_tokens)]
        torch_us, triton_us = row["torch us"], row["graph us"]
        return f"{torch_us:,.0f}/{triton_us:.{1 if num_tokens == 16 else 0}f}, {torch_us / triton_us:.1f}x"

    policies = ["topk", "pruned k0=4 p=0.7", "dynamic_skip beta=0.3", "token_drop capacity_factor=1.0"]
    policies += ["expanded_drop capacity_factor=1.0", "budget_drop max_lost_mass=0.01", "oea k0=4", "expert_drop"]
    policies += ["lynx num_dropped=8", "xshare k0=1 budget=16"]
    by_numba = ["laser eps_high=0.9 t_fix=0.01 c=16", "load_only"]
    experts = table("h100/decode_experts").query("shape == 'Qwen3-30B-A3B' and num_tokens == 16").set_index("activated")
    decode_us, grouped_us = experts.loc[49, ["decode", "grouped"]]
    lines = {name: len((KERNELS / f"{name}_triton.py").read_text().splitlines()) for name in FORMS}
    lines["capacity"] += len((KERNELS / "priority_triton.py").read_text().splitlines())
    alone = [found.loc[("torch.topk", num_tokens), "torch us"] for num_tokens in (16, 65_536)]
    (native_ms,) = table("h100/decode_graph").query("num_tokens == 16 and role == 'baseline'")["median_ms"]
    return [
        *(f"| `{policy.split()[0]}` | {gain(policy, 16)} | {gain(policy, 65_536)} |" for policy in policies),
        f"| `xshare` by request | {gain('xshare k0=1 scope=request request_budget=2', 16)} |",
        *(
            f"| `{policy.split()[0]}` | {gain(policy, 16)} | -/{found.loc[(policy, 65_536), 'graph us']:,.0f} |"
            for policy in by_numba
        ),
        f"| 49 activated | {grouped_us:.0f}/{decode_us:.1f}, {grouped_us / decode_us:.1f}x | - |",
        *(f"/{name}_triton.py) ({count}) |" for name, count in lines.items()),
        f"A layer takes {1000 * native_ms:.0f} us at 16 tokens",
        f"| `torch.topk` | {alone[0]:.1f} | {alone[1]:.0f} |",
    ]


# ---- what every page says --------------------------------------------------------------------------------------------

SAID = {
    "README.md": of_readme,
    "docs/papers.md": of_papers,
    "docs/balancing.md": of_balancing,
    "docs/quality.md": of_quality,
    "docs/clusters.md": of_clusters,
    "docs/atlas.md": of_atlas,
    "docs/kernels.md": of_kernels,
}
SENTENCES = [(page, sentence) for page, sentences in SAID.items() for sentence in sentences()]


def text_of(page: str) -> str:
    return " ".join((ROOT / page).read_text().split())


@pytest.mark.parametrize(("page", "sentence"), SENTENCES)
def test_a_page_says_what_its_csv_says(page: str, sentence: str) -> None:
    assert sentence in text_of(page)


# Made when they are asked for: what models them is imported then.
GPU_PAGES = {
    f"results/reference/{gpu}.md": cache(sentences) for gpu, sentences in (("h100", of_h100), ("h200", of_h200))
}


@pytest.mark.slow
@pytest.mark.parametrize("page", GPU_PAGES)
def test_a_gpus_page_says_what_its_files_say(page: str) -> None:
    """Every sentence with a measured or modelled number, and every row of its tables."""
    assert not [sentence for sentence in GPU_PAGES[page]() if sentence not in text_of(page)]


@pytest.mark.parametrize("page", GPU_PAGES)
def test_no_number_of_a_gpus_page_is_left_over(page: str) -> None:
    """What its files do not hold is a setting, a name, or said to have been seen at a commit."""
    text = " ".join(re.sub(r"^```.*?^```", "", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL).split())
    for sentence in sorted(GPU_PAGES[page](), key=len, reverse=True):
        text = text.replace(sentence, "")
    text = re.sub("|".join([r"`[^`]*`", r"\]\([^)]*\)", *SEEN, *SETTINGS]), "", text)
    assert not [word for word in text.split() if re.search(r"\d", word)]


@pytest.mark.parametrize("name", ["whatif-skew", "balance-recorded-modelled", "whole-capacity-modelled"])
def test_a_modelled_reference_rests_on_todays_figures(name: str) -> None:
    """Where a device's or a link's figures change, ``launch/references.sh`` makes it anew."""
    timed = [one.facts for one in load(REFERENCE / name).comparisons]
    assert timed
    for facts in timed:
        assert facts.device == Device.load(facts.device.name).facts
        assert facts.links == Links.load(facts.links.name).facts(facts.links.bandwidth_scale)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(path.parent.name for path in REFERENCE.glob("*/run.json")))
def test_a_summary_is_what_show_prints(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """``launch/references.sh --redraw`` prints it anew."""
    assert main(["show", f"results/reference/{name}"]) == OK
    assert capsys.readouterr().out == (REFERENCE / name / "summary.txt").read_text()
