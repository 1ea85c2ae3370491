"""Which kernel attention took, as it is seen and said."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from moe_ep_bench.layer import attention
from moe_ep_bench.layer.attention import kernels_of_attention


def attend() -> torch.Tensor:
    query, key = torch.ones(2, 4, 1, 8), torch.ones(2, 2, 9, 8)
    return scaled_dot_product_attention(query, key, key, enable_gqa=True)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_the_kernel_that_torch_takes_is_seen_whichever_it_is(mode: type) -> None:
    with mode(), sdpa_kernel(SDPBackend.MATH):
        assert kernels_of_attention(attend) == ["math"]
    with mode(), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        assert kernels_of_attention(attend) == ["flash on the CPU"]


def test_without_attention_nothing_is_seen_and_what_has_no_word_keeps_its_name() -> None:
    assert kernels_of_attention(lambda: torch.ones(2) + 1) == []
    with mock.patch.object(attention, "_NAMES", {}), sdpa_kernel(SDPBackend.MATH):
        assert kernels_of_attention(attend) == ["attention_math"]
