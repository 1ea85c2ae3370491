"""Fit data/skews/ to recordings and counts: print each skew of a model as its YAML file has it.

    python benchmarks/skews.py TRACES [--model NAME ...]

TRACES holds recordings (``*.safetensors``, moe-trace-v1) and counts of experts (``expert_loads.json``: objects with
``model``, ``domain``, ``source``, ``licence`` and ``load_E_by_layer``). Of each domain the median layer by relief is
fitted (``workload.targets``); neighbours and top-k mass are those of the same layer.

Shapes: L = layers, E = experts, T = tokens, K = top_k.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml
from numpy.typing import NDArray

from moe_ep_bench.models import ModelSpec
from moe_ep_bench.workload.targets import Skews
from moe_ep_bench.workload.trace import Trace, open_trace

EP_SIZE, FACTORS = 8, (1.0, 1.5)
# Counts of one model from several places: one of them is fitted (data/skews/mixtral-8x7b.yaml names the other).
COUNTED = {"olmoe-1b-7b": ("", "allenai"), "mixtral-8x7b": ("mixtral_8x7b_instruct", "efeslab")}


class Domain(NamedTuple):
    """Loads of one domain's layers, float64 [L, E], over how many tokens, and in which recording, if there is one."""

    name: str
    load_LE: NDArray[np.float64]
    num_tokens: int
    trace: Trace | None = None


def domains(folder: Path) -> Iterator[tuple[str, Domain]]:
    """Every model's preset with each of its domains."""
    for path in sorted(folder.glob("*.safetensors")):
        trace = open_trace(path)
        preset = next(name for name in Skews.names() if path.name.startswith(name))
        layers = range(trace.num_layers)
        load_LE = np.stack(
            [np.bincount(trace.read_layer(layer)[0].ravel(), minlength=trace.num_experts) for layer in layers]
        )
        yield preset, Domain(trace.metadata["domain"], load_LE.astype(np.float64), trace.num_tokens, trace)
    for counts in json.loads((folder / "expert_loads.json").read_text()):
        variant, source = COUNTED[counts["model"]]
        if counts.get("variant", "") == variant and counts["source"].startswith(source):
            name = counts["domain"].removeprefix("expert_popularity_")
            load_LE = np.array([*counts["load_E_by_layer"].values()], dtype=np.float64)
            yield counts["model"], Domain(name, load_LE, int(load_LE[0].sum()) // counts["top_k"])


def loads_after_cut(load_E: NDArray[Any], capacity_factor: float, num_ranks: int) -> tuple[float, float]:
    """A layer's loads after a capacity: the dropped share, and the fullest of contiguous ranks over the mean.

    Args:
        load_E: of all ranks' tokens; a rank's share of the experts is E / num_ranks.
        capacity_factor: ``inf`` = no cut.
    """
    relative_E = np.asarray(load_E, dtype=np.float64) / np.mean(load_E)
    kept_E = np.minimum(relative_E, capacity_factor)
    return 1 - float(kept_E.mean()), float(kept_E.reshape(num_ranks, -1).mean(axis=1).max())


def reliefs(load_LE: NDArray[np.float64], ep_size: int) -> NDArray[np.float64]:
    """Of each layer, the fullest rank's load over what a cut at factor 1 leaves of it: float64 [L]."""
    return np.array(
        [loads_after_cut(load_E, np.inf, ep_size)[1] / loads_after_cut(load_E, 1.0, ep_size)[1] for load_E in load_LE]
    )


def median_place(values: NDArray[np.float64]) -> int:
    """Where the (lower) median stands."""
    return int(np.argsort(values, kind="stable")[(len(values) - 1) // 2])


def fitted(load_E: NDArray[np.float64], ep_size: int | None, trace: Trace | None, layer: int) -> dict[str, Any]:
    """The numbers of one layer, as ``targets.Skew`` has them; without ``ep_size`` of experts alone."""
    found: dict[str, Any] = {"peak_load": load_E.max() / load_E.mean()}
    if ep_size and ep_size < len(load_E):
        found["rank_load"] = {"ep_size": ep_size, "load": loads_after_cut(load_E, np.inf, ep_size)[1]}
    if trace is not None:
        ids_TK, scores_TK = trace.read_layer(layer)
        if not trace.scores_are_normalised:
            found["topk_share"] = scores_TK.astype(np.float64).sum(axis=1).mean()
        inside_T = np.repeat(np.arange(len(trace.start_S) - 1), np.diff(trace.start_S))
        adjacent_T = inside_T[1:] == inside_T[:-1]
        common_T = (ids_TK[1:, :, None] == ids_TK[:-1, None, :]).sum(axis=(1, 2))
        found["neighbour_overlap"] = common_T[adjacent_T].mean()
    found["cuts"] = []
    for factor in FACTORS:
        dropped, kept = loads_after_cut(load_E, factor, ep_size or 1)
        found["cuts"].append(
            {"capacity_factor": factor, "dropped_share": dropped}
            | ({"rank_load": kept} if "rank_load" in found else {})
        )
    return found


def skews_of(preset: str, found: list[Domain]) -> dict[str, Any]:
    """All skews of a model by name; of a model whose domains were not told apart, ``mixed`` alone."""
    num_experts = ModelSpec.named(preset).num_experts
    ep_size = EP_SIZE if num_experts % EP_SIZE == 0 else None
    share_LE = sum(domain.load_LE / domain.load_LE.sum(axis=1, keepdims=True) for domain in found)
    layer = median_place(reliefs(share_LE, ep_size or 1))
    mixed = fitted(share_LE[layer], ep_size, found[0].trace if len(found) == 1 else None, layer)
    if len(found) > 1 and found[0].trace is not None:
        own = [fitted(domain.load_LE[layer], ep_size, domain.trace, layer) for domain in found]
        mixed |= {key: np.mean([one[key] for one in own]) for key in ("topk_share", "neighbour_overlap")}
    skews = {
        "mixed": said(
            mixed,
            f"{'all' if len(found) == 1 else len(found)} domains together, layer {layer}",
            sum(domain.num_tokens for domain in found),
            reliefs(share_LE, ep_size or 1),
        )
    }
    if len(found) == 1:
        return skews
    relief_DL = np.array([reliefs(domain.load_LE, ep_size or 1) for domain in found])

    def at(place: int, layer: int) -> dict[str, Any]:
        domain = found[place]
        numbers = fitted(domain.load_LE[layer], ep_size, domain.trace, layer)
        return said(numbers, f"{domain.name}, layer {layer}", domain.num_tokens, relief_DL[place])

    middle = divmod(median_place(relief_DL.ravel()), relief_DL.shape[1])
    peak_DL = np.array([domain.load_LE.max(axis=1) / domain.load_LE.mean(axis=1) for domain in found])
    skews["single_domain"] = at(*middle)
    skews["single_domain"]["layers"] = layers_of(relief_DL)
    skews["worst_layer"] = at(*divmod(int(peak_DL.argmax()), peak_DL.shape[1]))
    skews["domains"] = {domain.name: at(place, median_place(relief_DL[place])) for place, domain in enumerate(found)}
    return skews


def said(numbers: dict[str, Any], where: str, num_tokens: int, relief_L: NDArray[np.float64]) -> dict[str, Any]:
    return {"where": where, "num_tokens": num_tokens, **numbers, "layers": layers_of(relief_L)}


def layers_of(relief_L: NDArray[np.float64]) -> dict[str, Any]:
    ends = np.quantile(relief_L, (0, 0.5, 1))
    return {"num_layers": relief_L.shape[-1], "relief": ends.tolist()}


def rounded(value: Any) -> Any:
    """Numbers to four digits, as a file has them."""
    if isinstance(value, dict):
        return {key: rounded(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [rounded(inner) for inner in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("traces", type=Path, help="folder of recordings and counts")
    parser.add_argument("--model", nargs="*", help="presets; default: all")
    arguments = parser.parse_args()
    by_model: dict[str, list[Domain]] = {}
    for preset, domain in domains(arguments.traces):
        by_model.setdefault(preset, []).append(domain)
    for preset, found in by_model.items():
        if arguments.model is None or preset in arguments.model:
            print(f"# {preset}")
            print(yaml.safe_dump(rounded(skews_of(preset, found)), sort_keys=False, default_flow_style=None, width=120))


if __name__ == "__main__":
    main()
