"""What the staged group must do as gloo does it, on the ranks that torchrun has started; prints each law that holds."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from moe_ep_bench.runtime.attempts import is_of_peers
from moe_ep_bench.runtime.staged import STAGED, StagedGroup, register

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8)


class Lab:
    """Two groups of all ranks, one of which gloo alone carries."""

    def __init__(self) -> None:
        register()
        dist.init_process_group(STAGED, timeout=datetime.timedelta(seconds=20))
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.staged, self.gloo = dist.group.WORLD, dist.new_group(backend="gloo")
        self.device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        assert isinstance(self.staged, StagedGroup)

    def numbers(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Small integers, of which sums are exact in every dtype; other ones on every rank."""
        generator = torch.Generator().manual_seed(self.rank)
        return torch.randint(0, 9, shape, generator=generator).to(dtype)

    def alike(
        self, collective: Callable[[Tensor, Tensor, dist.ProcessGroup], object], sent: Tensor, out: Tensor
    ) -> None:
        """A collective leaves in both groups the same in what it sends and in what it fills."""
        expected_sent, expected = sent.clone(), out.clone()
        collective(expected_sent, expected, self.gloo)
        found_sent, found = sent.to(self.device), out.to(self.device)
        if sent is out:
            expected, found = expected_sent, found_sent
        collective(found_sent, found, self.staged)
        torch.testing.assert_close(found_sent.cpu(), expected_sent, rtol=0, atol=0)
        torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=0)


def _exchange(sent: Tensor, out: Tensor, group: dist.ProcessGroup, **splits: list[int]) -> None:
    dist.all_to_all_single(out, sent, group=group, **splits)


def all_to_all_with_uneven_splits(lab: Lab) -> None:
    for dtype in DTYPES:
        sizes_RR = [[(3 * source + 2 * to) % 5 for to in range(lab.size)] for source in range(lab.size)]
        input_splits, output_splits = sizes_RR[lab.rank], [row[lab.rank] for row in sizes_RR]
        sent, out = lab.numbers(sum(input_splits), 3, dtype=dtype), torch.zeros(sum(output_splits), 3, dtype=dtype)
        exchange = partial(_exchange, output_split_sizes=output_splits, input_split_sizes=input_splits)
        lab.alike(exchange, sent, out)


def all_to_all_with_even_splits(lab: Lab) -> None:
    sent = lab.numbers(2 * lab.size, 3)
    lab.alike(lambda s, o, g: dist.all_to_all_single(o, s, group=g), sent, torch.zeros_like(sent))


def all_to_all_of_ranks_that_send_or_get_nothing(lab: Lab) -> None:
    """Rank 0 gets all rows, and has none; then nobody has any."""
    rows = 0 if lab.rank == 0 else 4
    input_splits = [rows] + [0] * (lab.size - 1)
    output_splits = [0, *[4] * (lab.size - 1)] if lab.rank == 0 else [0] * lab.size
    sent, out = lab.numbers(rows, 2), torch.zeros(sum(output_splits), 2)
    lab.alike(lambda s, o, g: dist.all_to_all_single(o, s, output_splits, input_splits, group=g), sent, out)
    nothing = [0] * lab.size
    lab.alike(
        lambda s, o, g: dist.all_to_all_single(o, s, nothing, nothing, group=g), torch.zeros(0, 2), torch.zeros(0, 2)
    )


def all_to_all_of_parts_of_a_tensor(lab: Lab) -> None:
    """Views keep what is beside them."""
    wide = lab.numbers(lab.size, 8).to(lab.device)
    out = torch.full((2 * lab.size, 8), 7.0, device=lab.device)
    dist.all_to_all_single(out[: lab.size], wide, group=lab.staged)
    assert (out[lab.size :] == 7).all()


def all_reduce_sums_and_maxima(lab: Lab) -> None:
    for dtype in DTYPES:
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
            tensor = lab.numbers(4, 3, dtype=dtype)
            lab.alike(lambda s, o, g, op=op: dist.all_reduce(s, op, group=g), tensor, tensor)


def gathers_scatters_and_broadcasts(lab: Lab) -> None:
    one, all_of_it = lab.numbers(2, 3), torch.zeros(2 * lab.size, 3)
    lab.alike(lambda s, o, g: dist.all_gather_into_tensor(o, s, group=g), one, all_of_it)
    lab.alike(lambda s, o, g: dist.all_gather(list(o.chunk(lab.size)), s, group=g), one, all_of_it)
    lab.alike(
        lambda s, o, g: dist.reduce_scatter_tensor(o, s, group=g), lab.numbers(2 * lab.size, 3), torch.zeros(2, 3)
    )
    lab.alike(
        lambda s, o, g: dist.reduce_scatter(o, list(s.chunk(lab.size)), group=g),
        lab.numbers(2 * lab.size, 3),
        torch.zeros(2, 3),
    )
    lab.alike(lambda s, o, g: dist.broadcast(s, lab.size - 1, group=g), one, one)
    dist.barrier(group=lab.staged)


def lists_go_all_to_all(lab: Lab) -> None:
    """gloo has no such collective: rank r sends (r, to) to every other."""
    sent = [torch.tensor([lab.rank, to], dtype=torch.float32, device=lab.device) for to in range(lab.size)]
    out = [torch.zeros(2, device=lab.device) for _ in range(lab.size)]
    dist.all_to_all(out, sent, group=lab.staged)
    assert [pair.tolist() for pair in out] == [[source, lab.rank] for source in range(lab.size)]


def collectives_are_in_order_with_their_stream(lab: Lab) -> None:
    """What is queued before is seen by peers; what is queued behind sees what they sent; other streams wait for it."""
    tensor = torch.ones(1 << 16, device=lab.device)
    if lab.device.type == "cuda":
        torch.cuda._sleep(20_000_000)
    tensor.mul_(lab.rank + 1)
    work = dist.all_reduce(tensor, group=lab.staged, async_op=True)
    assert work is not None
    work.wait()
    assert work.is_completed()
    doubled = tensor * 2
    assert (doubled == lab.size * (lab.size + 1)).all()


def groups_of_some_ranks_stand_beside(lab: Lab) -> None:
    group, _ = dist.new_subgroups(lab.size // 2 or 1)
    assert isinstance(group, StagedGroup)
    tensor = torch.ones(1, device=lab.device)
    dist.all_reduce(tensor, group=group)
    assert tensor.item() == group.size()


def a_rank_that_is_late_past_the_timeout_is_an_error_of_the_others(lab: Lab) -> None:
    """They raise as gloo does, and say that it is another's; groups beside go on."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=5))
    assert isinstance(group, StagedGroup)
    if lab.rank < lab.size - 1:
        error: Exception | None = None
        try:
            dist.all_reduce(torch.ones(1, device=lab.device), group=group)
        except RuntimeError as problem:
            error = problem
        assert error is not None
        assert is_of_peers(error), error
    dist.barrier(group=lab.gloo)


def the_error_of_one_rank_reaches_the_others(lab: Lab) -> None:
    """Last, as it ends the group: a rank that is gone is named as gone, soon, and nobody hangs."""
    if lab.rank == lab.size - 1:
        report(the_error_of_one_rank_reaches_the_others)
        os._exit(0)
    try:
        while True:
            dist.all_reduce(torch.ones(1, device=lab.device), group=lab.staged)
    except RuntimeError as problem:
        error = problem
    assert is_of_peers(error), error


def report(law: Callable[[Lab], None]) -> None:
    """In one write: ranks print at once."""
    os.write(1, f"held {law.__name__}\n".encode())


LAWS = (
    all_to_all_with_uneven_splits,
    all_to_all_with_even_splits,
    all_to_all_of_ranks_that_send_or_get_nothing,
    all_to_all_of_parts_of_a_tensor,
    all_reduce_sums_and_maxima,
    gathers_scatters_and_broadcasts,
    lists_go_all_to_all,
    collectives_are_in_order_with_their_stream,
    groups_of_some_ranks_stand_beside,
    a_rank_that_is_late_past_the_timeout_is_an_error_of_the_others,
    the_error_of_one_rank_reaches_the_others,
)

if __name__ == "__main__":
    lab = Lab()
    for law in LAWS:
        law(lab)
        report(law)
