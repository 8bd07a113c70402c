from __future__ import annotations

from typing import Any

import pytest
import torch
from d9d_weights.sharding.collectives import (
    all_gather_objects,
    all_gather_tensors,
    gather_objects,
    gather_tensors,
    start_all_gather,
)
from torch import Tensor
from torch import distributed as dist

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint8, torch.complex64, torch.float8_e4m3fn]


def tensor_of(rank: int, dtype: torch.dtype) -> Tensor:
    """Rank 0 has a scalar, rank 1 an odd row, rank 2 an empty matrix."""
    return [torch.tensor(3), torch.arange(1, 8), torch.empty(3, 0)][rank].to(dtype)


def every_dtype_arrives() -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for dtype in DTYPES:
        for dst in range(ranks):
            everywhere = all_gather_tensors(tensor_of(rank, dtype), dist.group.WORLD)
            there = gather_tensors(tensor_of(rank, dtype), dist.group.WORLD, dst)
            assert (there is None) == (rank != dst)
            for gathered in (everywhere, there or everywhere):
                assert [part.dtype for part in gathered] == [dtype] * ranks
                assert [part.shape for part in gathered] == [tensor_of(r, dtype).shape for r in range(ranks)]
                for r, part in enumerate(gathered):
                    assert part.reshape(-1).view(torch.uint8).equal(tensor_of(r, dtype).reshape(-1).view(torch.uint8))


@pytest.mark.thorough
@pytest.mark.parametrize("size", [2, 3])
def test_tensors_of_any_shape_and_dtype_arrive_as_they_were(world: Any, size: int) -> None:
    world(size).run(every_dtype_arrives)


def odd_tensors_arrive() -> None:
    rank, world = dist.get_rank(), dist.group.WORLD
    transposed = torch.arange(6.0, requires_grad=True).reshape(2, 3).T if rank else torch.empty(0)
    _, arrived = all_gather_tensors(transposed, world)
    assert arrived.tolist() == [[0, 3], [1, 4], [2, 5]]
    assert not arrived.requires_grad
    assert arrived.untyped_storage().nbytes() == 6 * 4
    assert [part.shape for part in all_gather_tensors(torch.empty(0, rank), world)] == [(0, 0), (0, 1)]
    empty = gather_tensors(torch.empty(0, rank), world, 1)
    assert empty is None if rank == 0 else [part.shape for part in empty] == [(0, 0), (0, 1)]


def test_views_and_empty_tensors_can_be_gathered(world: Any) -> None:
    world(2).run(odd_tensors_arrive)


def others_are_on_their_way() -> None:
    rank, world = dist.get_rank(), dist.group.WORLD
    sent = torch.arange(6.0, requires_grad=True).reshape(2, 3).T * rank
    pending = start_all_gather(sent, world)
    second = start_all_gather(torch.tensor(rank), world)
    assert [part.item() for part in second.wait()] == [0, 1]
    first, other = pending.wait()
    assert pending.wait()[1] is other
    assert first.tolist() == [[0, 0]] * 3
    assert other.tolist() == [[0, 3], [1, 4], [2, 5]]
    assert not other.requires_grad


def test_gathering_goes_on_beside_other_work(world: Any) -> None:
    world(2).run(others_are_on_their_way)
    alone = torch.arange(3)
    (copy,) = start_all_gather(alone, None).wait()
    assert copy.tolist() == [0, 1, 2]
    assert copy is not alone


def bad_tensors_are_refused_everywhere() -> list[str]:
    rank, world = dist.get_rank(), dist.group.WORLD
    dtype = [torch.float32, torch.bfloat16, torch.float32][rank]
    messages = []
    for function in (all_gather_tensors, gather_tensors):
        for bad in (torch.zeros(2, dtype=dtype), torch.zeros([1] * 17 if rank == 2 else [2])):
            with pytest.raises(ValueError, match="cannot gather") as caught:
                function(bad, world)
            messages.append(str(caught.value))
    assert [part.item() for part in all_gather_tensors(torch.tensor(rank), world)] == [0, 1, 2]  # no rank waits
    return messages


def test_tensors_that_differ_in_dtype_name_the_ranks(world: Any) -> None:
    dtypes, dims = (
        "cannot gather tensors of different dtypes: rank 0 has float32, rank 1 has bfloat16, rank 2 has float32; "
        "convert them to one",
        "cannot gather tensors of more than 16 dimensions: rank 0 has 1, rank 1 has 1, rank 2 has 17; flatten them",
    )
    assert world(3).run(bad_tensors_are_refused_everywhere) == [[dtypes, dims] * 2] * 3


def objects_arrive() -> None:
    rank, world = dist.get_rank(), dist.group.WORLD
    value = [None, {"näme": ["x" * 1000, 2**70, 0.1, True]}, float("inf")][rank]
    expected = [None, {"näme": ["x" * 1000, 2**70, 0.1, True]}, float("inf")]
    assert all_gather_objects(value, world) == expected
    assert gather_objects(value, world, 2) == (expected if rank == 2 else None)
    pair = dist.new_group([1, 2])
    if rank:  # ranks count inside the group, messages name them as everyone does
        assert gather_objects(rank, pair, 1) == ([1, 2] if rank == 2 else None)
        with pytest.raises(TypeError, match=r"only JSON values can be gathered; rank 2: value\['a'\]\[0\] is a set$"):
            all_gather_objects({"a": [set()]} if rank == 2 else 1, pair)
    with pytest.raises(ValueError, match="dst is 3, but the group has 3 rank"):
        gather_objects(1, world, 3)


def test_objects_arrive_by_rank_in_their_group(world: Any) -> None:
    world(3).run(objects_arrive)


def only_those_concerned_fail() -> str:
    value: Any = {1: "one"} if dist.get_rank() == 1 else "fine"
    try:
        gather_objects(value, dist.group.WORLD, 0)
    except TypeError as error:
        return str(error)
    return "sent"


def test_what_is_no_json_fails_where_it_is_and_where_it_should_arrive(world: Any) -> None:
    receiver, culprit, bystander = world(3).run(only_those_concerned_fail)
    assert receiver == culprit
    assert receiver.endswith("rank 1: value has the key 1, not a string")
    assert bystander == "sent"


def single_groups_work() -> None:
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    for group in (alone, None):
        tensor = torch.ones(2)
        (copy,) = all_gather_tensors(tensor, group)
        (other,) = gather_tensors(tensor, group) or ()
        tensor.zero_()
        assert copy.tolist() == other.tolist() == [1, 1]
        assert all_gather_objects((1, {"a": None}), group) == gather_objects([1, {"a": None}], group)


def test_groups_of_one_need_nobody(world: Any) -> None:
    world(2).run(single_groups_work)


def test_without_groups_a_process_gathers_from_itself() -> None:
    assert all_gather_objects([1, (2,)], None) == [[1, [2]]]
    assert gather_tensors(torch.tensor([1, 2]), None)[0].tolist() == [1, 2]
    with pytest.raises(TypeError, match="rank 0: value is a object"):
        all_gather_objects(object(), None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="dst is 1, but the group has 1 rank"):
        gather_tensors(torch.zeros(1), None, 1)


def device_tensors_and_objects_arrive() -> None:
    rank, world = dist.get_rank(), dist.group.WORLD
    torch.cuda.set_device(rank)
    for dtype in DTYPES:
        part = tensor_of(rank, dtype).cuda()
        everywhere, there = all_gather_tensors(part, world), gather_tensors(part, world, 1)
        assert (there is None) == (rank != 1)
        for gathered in (everywhere, there or everywhere):
            assert {tensor.device for tensor in gathered} == {torch.device("cuda", rank)}
            for r, tensor in enumerate(gathered):
                expected = tensor_of(r, dtype)
                assert (tensor.dtype, tensor.shape) == (dtype, expected.shape)
                assert tensor.cpu().reshape(-1).view(torch.uint8).equal(expected.reshape(-1).view(torch.uint8))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    assert all_gather_objects({"rank": rank}, world) == [{"rank": 0}, {"rank": 1}]
    assert gather_objects(rank, world, 1) == ([0, 1] if rank == 1 else None)
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_device_tensors_and_objects_arrive_over_nccl(world: Any) -> None:
    world(2, backend="cpu:gloo,cuda:nccl").run(device_tensors_and_objects_arrive)
