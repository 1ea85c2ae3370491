"""Claims about experts in Triton: those of a decode step, and sums of rows. What is right is a plain loop in float64.

They run in Triton's interpreter, which multiplies the bits of bfloat16 matrices as whole numbers: there the 16-bit type
is float16, and bfloat16 waits for a GPU. What torch leaves uninitialised is NaN here, so that a kernel that reads what
nobody wrote is found out.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_cases import few_examples
from torch import Tensor

from moe_ep_bench.kernels import decode_experts_triton, experts_triton
from moe_ep_bench.kernels import experts as experts_by_torch
from moe_ep_bench.kernels.decode_experts_triton import combine, decode_experts

# Largest error of a value, relative to the sum of its products' sizes: the activation is rounded once, and so is a row.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
DTYPES = [torch.float32, torch.float16]

pytestmark = pytest.mark.usefixtures("patched_once", "uninitialised_is_nan")


@pytest.fixture(scope="module")
def uninitialised_is_nan() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


# --- Making cases ------------------------------------------------------------------------------------------


def weights(num_experts: int, hidden_size: int, ffn_size: int, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    """Experts that keep the size of their inputs: gate_up_L2FD and down_LDF."""
    generator = torch.Generator().manual_seed(seed)
    gate_up_L2FD = torch.randn(num_experts, 2 * ffn_size, hidden_size, generator=generator) / hidden_size**0.5
    down_LDF = torch.randn(num_experts, hidden_size, ffn_size, generator=generator) / ffn_size**0.5
    return [gate_up_L2FD.to(dtype), down_LDF.to(dtype)]


def routed(num_tokens: int, num_experts: int, hidden_size: int, dtype: torch.dtype, share: float = 0.3, seed: int = 0):
    """Inputs, a map of which about this share is true, and weights: those of other pairs are NaN."""
    generator = torch.Generator().manual_seed(seed)
    hidden_TD = torch.randn(num_tokens, hidden_size, generator=generator).to(dtype)
    map_TL = torch.rand(num_tokens, num_experts, generator=generator) < share
    weights_TL = torch.rand(num_tokens, num_experts, generator=generator)
    return hidden_TD, map_TL, torch.where(map_TL, weights_TL, torch.nan)


def loop(
    hidden_TD: Tensor, map_TL: Tensor, weights_TL: Tensor, gate_up_L2FD: Tensor, down_LDF: Tensor
) -> tuple[Tensor, Tensor]:
    """What it all comes to, and the sum of the sizes of the products of which it is a sum: float64 [T, D] each."""
    out_TD, size_TD = torch.zeros(2, *hidden_TD.shape, dtype=torch.float64)
    for expert, (gate_up_2FD, down_DF) in enumerate(zip(gate_up_L2FD.double(), down_LDF.double(), strict=True)):
        token_N = map_TL[:, expert].nonzero().squeeze(1)
        gate_NF, up_NF = (hidden_TD[token_N].double() @ gate_up_2FD.T).chunk(2, dim=1)
        activated_NF = torch.nn.functional.silu(gate_NF) * up_NF * weights_TL[token_N, expert].double()[:, None]
        out_TD[token_N] += activated_NF @ down_DF.T
        size_TD[token_N] += activated_NF.abs() @ down_DF.T.abs()
    return out_TD, size_TD


def assert_close(ours_TD: Tensor, expected: tuple[Tensor, Tensor]) -> None:
    out_TD, size_TD = expected
    assert ours_TD.shape == out_TD.shape
    # Beside it, what float32 and the smallest float16 lose of values about 1.
    worst = ((ours_TD.double() - out_TD).abs() / (size_TD + 1e-2)).max()
    assert worst <= TOLERANCE[ours_TD.dtype]


def assert_like_the_loop(*case: Tensor, device: str = "cpu") -> None:
    assert_close(decode_experts(*(one.to(device) for one in case)).cpu(), loop(*case))


# --- All together ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@settings(few_examples, max_examples=3)
@given(
    num_tokens=st.integers(1, 40),
    num_experts=st.integers(1, 6),
    hidden_size=st.integers(1, 90),
    ffn_size=st.integers(1, 50),
    share=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    step_bytes=st.sampled_from([4096, 24 * 1024]),
    enough_programs=st.sampled_from([1, 528]),
)
def test_any_shape_equals_a_loop_over_experts(
    dtype, num_tokens, num_experts, hidden_size, ffn_size, share, step_bytes, enough_programs
):
    case = routed(num_tokens, num_experts, hidden_size, dtype, share)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(decode_experts_triton, "_STEP_BYTES", step_bytes)
        monkeypatch.setattr(decode_experts_triton, "_ENOUGH_PROGRAMS", enough_programs)
        assert_like_the_loop(*case, *weights(num_experts, hidden_size, ffn_size, dtype))


def test_an_expert_without_tokens_is_not_read():
    hidden_TD, map_TL, weights_TL = routed(6, 5, 40, torch.float32, share=1.0)
    map_TL[:, [0, 2, 4]] = False
    experts = weights(5, 40, 24, torch.float32)
    expected = loop(hidden_TD, map_TL, weights_TL, *experts)
    for one in experts:
        one[[0, 2, 4]] = torch.nan
    assert_close(decode_experts(hidden_TD, map_TL, weights_TL, *experts), expected)
    assert not decode_experts(hidden_TD, torch.zeros_like(map_TL), weights_TL, *experts).any()


def test_an_expert_of_more_rows_than_a_tile_takes_them_all_from_a_long_map(launches, monkeypatch):
    monkeypatch.setattr(decode_experts_triton, "_MOST_TOKENS", 16)
    monkeypatch.setattr(decode_experts_triton, "_MOST_ROWS", 16)
    hidden_TD, map_TL, weights_TL = routed(40, 3, 40, torch.float32, share=0.1)
    map_TL[:, 1] = True
    assert_like_the_loop(hidden_TD, map_TL, weights_TL.nan_to_num(0.5), *weights(3, 40, 24, torch.float32))
    assert launches == ["_gate_up_kernel", "_down_kernel", "_combine_kernel"]


# --- Parts -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_experts", "hidden_size", "dtype"), [(5, 40, torch.float32), (37, 300, torch.float16)])
def test_combining_adds_in_the_order_of_experts(launches, num_experts, hidden_size, dtype):
    _, map_TL, _ = routed(6, num_experts, 1, torch.float32, share=0.5)
    map_TL[4] = False
    # Of such different sizes that another order gives another sum.
    generator = torch.Generator().manual_seed(1)
    size_LT1 = 10.0 ** torch.randint(-4, 4, (num_experts, 6, 1), generator=generator)
    rows_LTD = (torch.randn(num_experts, 6, hidden_size, generator=generator) * size_LT1).to(dtype)
    rows_LTD[~map_TL.T] = torch.nan

    def added(experts: range) -> Tensor:
        total_TD = torch.zeros(6, hidden_size)
        for expert in experts:
            here_T = map_TL[:, expert]
            total_TD[here_T] += rows_LTD[expert, here_T].float()
        return total_TD

    assert torch.equal(combine(rows_LTD.flatten(0, 1), map_TL), added(range(num_experts)).to(dtype))
    assert not torch.equal(added(range(num_experts)), added(range(num_experts)[::-1]))
    assert launches == ["_combine_kernel"]


def test_a_slice_of_a_map_is_copied_ahead_of_all_launches(monkeypatch):
    """A launch overlaps the one before it alone: were that the copy, the sums might read it half written."""
    hidden_TD, map_TE, weights_TE = routed(6, 8, 40, torch.float32)
    local, experts, maps = slice(2, 5), weights(3, 40, 24, torch.float32), []
    here = map_TE[:, local], weights_TE[:, local]
    monkeypatch.setattr(
        decode_experts_triton, "combine", lambda rows, map_TL: maps.append(map_TL) or combine(rows, map_TL)
    )
    assert_like_the_loop(hidden_TD, *here, *experts)
    assert maps[0].is_contiguous()


# --- On a GPU ----------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "hidden_size", "ffn_size"),
    [(16, 32, 2048, 768), (16, 16, 4096, 192), (1, 8, 2880, 2880), (40, 12, 2048, 1408), (300, 8, 1030, 90)],
)
def test_a_gpu_equals_a_loop_over_experts(dtype, num_tokens, num_experts, hidden_size, ffn_size):
    case = *routed(num_tokens, num_experts, hidden_size, dtype), *weights(num_experts, hidden_size, ffn_size, dtype)
    assert_like_the_loop(*case, device="cuda")


@pytest.mark.gpu
def test_a_graph_may_be_replayed_with_another_map():
    experts = weights(32, 512, 256, torch.bfloat16)
    on_device = [one.cuda() for one in (*routed(16, 32, 512, torch.bfloat16), *experts)]
    decode_experts(*on_device)  # compiled before it is captured
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out_TD = decode_experts(*on_device)
    for seed, share in enumerate((0.0, 0.02, 0.25, 1.0)):
        inputs = routed(16, 32, 512, torch.bfloat16, share, seed)
        for held, new in zip(on_device[:3], inputs, strict=True):
            held.copy_(new)
        graph.replay()
        assert_close(out_TD.cpu(), loop(*inputs, *experts))
        assert torch.equal(out_TD, decode_experts(*on_device))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("num_tokens", "num_experts"), [(1, 1), (5, 12), (40, 7)])
def test_the_host_s_form_equals_a_loop_over_experts(num_tokens: int, num_experts: int, dtype: torch.dtype) -> None:
    step = *routed(num_tokens, num_experts, 48, dtype), *weights(num_experts, 48, 32, dtype)
    assert_close(experts_by_torch.decode_experts(*step), loop(*step))
    none = *routed(0, num_experts, 48, dtype), *weights(num_experts, 48, 32, dtype)
    assert experts_by_torch.decode_experts(*none).shape == (0, 48)


# --- Rows before, between and after the GEMMs ---------------------------------------------------------------

devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
row_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


@devices
@row_dtypes
@pytest.mark.parametrize("num_columns", [1, 48, 2880])
@pytest.mark.parametrize(("num_places", "count"), [(0, 0), (7, 0), (7, 4), (7, 7), (77, 40)])
def test_only_rows_of_pairs_that_were_chosen_are_gathered(
    num_places: int, count: int, num_columns: int, dtype: torch.dtype, device: str
) -> None:
    """A policy that keeps 62 % of the pairs moved 100 % of their rows: 0.10 to 0.14 ms of a layer on an H100."""
    if device == "cuda":
        num_places, count = 10 * num_places, 10 * count
    generator = torch.Generator().manual_seed(1)
    rows_TD = torch.randn(5, num_columns, generator=generator).to(dtype)
    places_N = torch.randint(5, (num_places,), generator=generator)
    expected_ND = rows_TD.index_select(0, places_N)
    for form in (experts_triton.first_rows, *([experts_by_torch.first_rows] if device == "cpu" else [])):
        found_ND = form(rows_TD.to(device), places_N.to(device), torch.tensor(count, device=device)).cpu()
        assert found_ND.shape == expected_ND.shape
        assert torch.equal(found_ND[:count], expected_ND[:count])
        assert found_ND[count:].isnan().all(), "nobody wrote these"


@devices
@row_dtypes
@pytest.mark.parametrize("shape", [(0, 16), (1, 1), (5, 48), (70, 1024), (3, 1408)])
def test_the_compiled_activation_equals_its_formula(shape: tuple[int, int], dtype: torch.dtype, device: str) -> None:
    num_rows, ffn_size = shape
    generator = torch.Generator().manual_seed(1)
    gate_up_N2F = (3 * torch.randn(num_rows, 2 * ffn_size, generator=generator)).to(dtype)
    weights_N = torch.rand(num_rows, generator=generator)
    ours_NF = experts_triton.weighted_swiglu(gate_up_N2F.to(device), weights_N.to(device)).cpu()
    assert ours_NF.dtype == dtype
    rounding = {"rtol": 1e-2 if dtype == torch.bfloat16 else 1e-5 if device == "cuda" else 1e-6, "atol": 1e-6}
    torch.testing.assert_close(ours_NF, experts_by_torch.weighted_swiglu_formula(gate_up_N2F, weights_N), **rounding)


def test_the_activation_is_silu_of_the_gate_times_up_times_weight() -> None:
    gate_up_N2F = torch.tensor([[1.0, -2.0, 3.0, 4.0], [0.0, 5.0, 6.0, -7.0]])
    weights_N = torch.tensor([0.5, 2.0])
    expected = [[w * (g / (1 + 2.718281828459045 ** -g)) * u for g, u in zip(row[:2], row[2:], strict=True)]
                for row, w in zip(gate_up_N2F.tolist(), weights_N.tolist(), strict=True)]  # fmt: skip
    torch.testing.assert_close(experts_by_torch.weighted_swiglu_formula(gate_up_N2F, weights_N), torch.tensor(expected))


@devices
@row_dtypes
@pytest.mark.parametrize(
    ("counts", "num_columns"),
    [([], 16), ([0], 16), ([1], 1), ([0, 3, 0, 9, 1, 0], 48), ([2, 5], 1408), ([n % 9 for n in range(99)], 33)],
    ids=str,
)
def test_the_compiled_sums_of_rows_equal_bags(
    counts: list[int], num_columns: int, dtype: torch.dtype, device: str
) -> None:
    generator = torch.Generator().manual_seed(1)
    ends_T = torch.tensor(counts, dtype=torch.int64).cumsum(0)
    rows_ND = torch.randn(sum(counts) + 2, num_columns, generator=generator).to(dtype)  # two of no token
    places_N = torch.randperm(len(rows_ND), generator=generator)
    expected_TD = experts_by_torch.row_sums_by_bags(rows_ND.float(), places_N, ends_T).to(dtype)
    found_TD = experts_triton.row_sums(rows_ND.to(device), places_N.to(device), ends_T.to(device))
    torch.testing.assert_close(found_TD.cpu(), expected_TD)


def test_bags_hold_each_tokens_rows_and_no_others() -> None:
    rows_ND = torch.tensor([[1.0], [10.0], [100.0], [1000.0]])
    places_N, ends_T = torch.tensor([2, 0, 1, 3]), torch.tensor([2, 2, 3])  # the last row is of no token
    assert experts_by_torch.row_sums_by_bags(rows_ND, places_N, ends_T).tolist() == [[101.0], [0.0], [10.0]]
