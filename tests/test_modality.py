"""Image tokens inside a language model: priorities by modality, told through the hooks; the text alone is judged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import hf_models
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from test_quality import Judged, judged, quality_of
from torch import Tensor
from torch.nn import functional

from moe_ep_bench.analysis.quality_frames import read_quality, text_costs
from moe_ep_bench.analysis.quality_orderings import orderings
from moe_ep_bench.analysis.show import quality_text
from moe_ep_bench.policies import make_policy
from moe_ep_bench.policies.capacity import IMAGE
from moe_ep_bench.quality.checkpoint import Checkpoint
from moe_ep_bench.quality.routed import RouterCall, routed
from moe_ep_bench.quality.session import plan_quality, run_quality
from moe_ep_bench.quality.text import Text
from moe_ep_bench.results import RunDirectory

PREFIX, TEXT = 24, 8
MODALITIES = ("image_first", "uniform", "text_first")
CONFIG: dict[str, Any] = {
    "name": "tiny",
    "model": {"checkpoint": "tiny-olmoe", "device": "cpu"},
    "text": {
        "file": "words.txt",
        "num_sequences": 12,
        "sequence_length": TEXT,
        "batch_size": 4,
        "image_prefix": {"tokens": PREFIX, "num_patterns": 2, "pattern_length": 5},
    },
    "layer": {"ep_size": 2},
    "policies": [
        {"name": "token_drop", "capacity_factor": 0.5, "modality": list(MODALITIES)},
    ],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("modality")
    hf_models.checkpoint(folder / "tiny-olmoe", "olmoe")
    (folder / "words.txt").write_text("".join(f"{n}: the mean of {n * 7 % 13} and a word\n" for n in range(40)))
    (folder / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    return folder


@pytest.fixture(scope="module")
def model() -> Any:
    return hf_models.tiny("olmoe")


def images_first(num_sequences: int) -> Tensor:
    modality_BS = torch.zeros(num_sequences, PREFIX + TEXT, dtype=torch.int64)
    modality_BS[:, :PREFIX] = IMAGE
    return modality_BS


def test_an_expert_drops_the_favoured_modality_only_when_nothing_of_the_other_is_left(model: Any) -> None:
    """Rank by rank: each has two of the four sequences, and drops by a capacity of its own."""
    tokens_BS = hf_models.tokens(4, PREFIX + TEXT)
    is_image_T = images_first(4).flatten() == IMAGE
    dropped_text = {}
    for modality in MODALITIES:
        seen: list[RouterCall] = []
        policy = make_policy({"name": "token_drop", "capacity_factor": 0.25, "modality": modality})
        with (
            torch.inference_mode(),
            routed(model, policy, num_ranks=2, modality_BS=images_first(4), observe=seen.append),
        ):
            model(tokens_BS, use_cache=False)
        assert len(seen) == 2
        dropped_text[modality] = 0
        both_dropped = 0
        for one in seen:
            assert one.routing is not None
            for (_, token_N), expert in ((share, e) for share in one.forward_pass.batches(2)[0] for e in range(8)):
                own_N = one.own_TE[token_N, expert]
                kept_N = one.routing.map_TE[token_N, expert]
                image_N = is_image_T[token_N]
                dropped_N = own_N & ~kept_N
                dropped_text[modality] += int((dropped_N & ~image_N).sum())
                both_dropped += bool((dropped_N & image_N).any()) and bool((dropped_N & ~image_N).any())
                if modality == "image_first" and (dropped_N & ~image_N).any():
                    assert not (kept_N & image_N).any()
                if modality == "text_first" and (dropped_N & image_N).any():
                    assert not (kept_N & ~image_N).any()
        if modality == "uniform":
            assert both_dropped, "the test could not fail"
    assert dropped_text["image_first"] < dropped_text["uniform"] < dropped_text["text_first"]


def test_a_modality_of_other_tokens_is_refused_and_what_is_generated_is_text(model: Any) -> None:
    policy = make_policy({"name": "token_drop", "capacity_factor": 0.5, "modality": "image_first"})
    tokens_BS = hf_models.tokens(2, PREFIX + TEXT)
    with (
        torch.inference_mode(),
        routed(model, policy, modality_BS=images_first(3)),
        pytest.raises(ValueError, match=r"modality_BS: expected \[2, 32\], .* got \[3, 32\]"),
    ):
        model(tokens_BS)
    seen: list[RouterCall] = []
    with routed(model, policy, modality_BS=images_first(2), acts_in=("prefill", "decode"), observe=seen.append):
        model.generate(tokens_BS, max_new_tokens=3, min_new_tokens=3, do_sample=False)
    images = [int((one.context.modality_T == IMAGE).sum()) for one in seen if one.context.modality_T is not None]
    assert images == [2 * PREFIX] * 2 + [0] * 4


def test_the_texts_loss_alone_is_counted(folder: Path, tmp_path: Path) -> None:
    (comparison,) = plan_quality(folder / "config.yaml", [])
    assert isinstance(comparison.evaluated, Text)
    run_quality(folder / "config.yaml", tmp_path)
    directory = RunDirectory(tmp_path)
    model = Checkpoint.open(folder / "tiny-olmoe").load("auto", torch.device("cpu"))
    policy = make_policy({"name": "token_drop", "capacity_factor": 0.5, "modality": "image_first"})
    with torch.inference_mode():
        logits = {"native": model(comparison.evaluated.sequences, use_cache=False).logits}
        with routed(model, policy, num_ranks=2, modality_BS=images_first(4)):
            parts = [model(batch, use_cache=False).logits for batch in comparison.evaluated.sequences.split(4)]
        logits[policy.label] = torch.cat(parts)
    for case in comparison.cases:
        if case.label in logits:
            rows = pq.read_table(directory.path("quality", case.case_id)).to_pandas()
            assert (rows["num_tokens"] == TEXT - 1).all()
            expected = functional.cross_entropy(
                logits[case.label][:, PREFIX:-1].flatten(0, 1),
                comparison.evaluated.tokens_BS[:, 1:].flatten(),
                reduction="none",
            )
            rows = rows.pivot(index="item", columns="metric", values="value")
            np.testing.assert_allclose(rows["cross_entropy"], expected.view(12, TEXT - 1).mean(dim=1), rtol=1e-5)
        routing = pq.read_table(directory.path("routing", case.case_id)).to_pandas()
        assert (routing["num_image_tokens"] == 4 * PREFIX).all()
        assert (routing["num_tokens"] == 4 * (PREFIX + TEXT)).all()
    of_text = text_costs(read_quality(tmp_path)).set_index(["policy", "label"])["text_dropped_fraction"]
    image_first, uniform, text_first = of_text["token_drop"]
    assert image_first < uniform < text_first
    text = quality_text(tmp_path)
    assert "of text %" in text
    assert "no interval, and no verdict on orderings, below 10 batches; got 3" in text
    assert "every sequence follows 24 image tokens, which are synthetic" in text


def test_orderings_by_modality_are_told_of_each_policy_at_equal_capacity() -> None:
    def of(policy: str, modality: str, added: float, gamma: float = 1.0) -> Judged:
        noise_B = np.random.default_rng(0).normal(size=12)
        case = judged(policy, {"capacity_factor": gamma, "modality": modality}, list(noise_B + added))
        return {**case, "label": f"{policy} {modality}"}

    cases = [
        of("native", "uniform", 0.0),
        of("token_drop", "image_first", 0.1),
        of("token_drop", "uniform", 0.2),
        of("token_drop", "text_first", 0.15),
        of("expanded_drop", "text_first", 0.3),
        of("token_drop", "text_first", 9.0, gamma=0.5),
    ]
    found = orderings(quality_of(({}, cases)))
    found = found[found["ordering"].str.contains("images")]
    assert found[["better", "worse", "verdict"]].to_numpy().tolist() == [
        ["token_drop image_first", "token_drop uniform", "holds"],
        ["token_drop uniform", "token_drop text_first", "does not hold"],
    ]
