"""Image tokens inside a language model: priorities by modality, told through the hooks; the text alone is judged."""

from __future__ import annotations

from typing import Any

import hf_models
import pytest
import torch
from torch import Tensor

from moe_ep_bench.policies import make_policy
from moe_ep_bench.policies.capacity import IMAGE
from moe_ep_bench.quality.passes import RouterCall
from moe_ep_bench.quality.routed import routed

PREFIX, TEXT = 24, 8
MODALITIES = ("image_first", "uniform", "text_first")


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
