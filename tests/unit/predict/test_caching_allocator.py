"""The model of PyTorch's caching allocator: blocks, segments and streams."""

import pytest

from slm_toolkit.predict.memory.allocator import CachingAllocator, Request

KIB, MIB = 2**10, 2**20


def taken(*sizes: float, stream: int = 0, first: int = 1) -> list[Request]:
    return [("a", number, int(size), stream) for number, size in enumerate(sizes, first)]


def freed(*numbers: int) -> list[Request]:
    return [("f", number) for number in numbers]


@pytest.mark.parametrize(
    ("requests", "allocated", "reserved"),
    [
        (taken(600 * KIB, 600 * KIB), 1200 * KIB, 2 * MIB),  # small requests share a segment of 2 MiB
        (taken(600 * KIB, 600 * KIB, 900 * KIB), 2100 * KIB, 4 * MIB),  # 848 KiB are left in it
        (taken(1, 512, 513), 512 + 512 + 1024, 2 * MIB),
        (taken(9 * MIB, 9 * MIB), 18 * MIB, 20 * MIB),  # below 10 MiB they share 20
        (taken(9 * MIB, 9 * MIB, 3 * MIB), 21 * MIB, 40 * MIB),
        (taken(10.5 * MIB), 10.5 * MIB, 12 * MIB),  # larger ones have their own, in steps of 2 MiB
        # a rest of 1 MiB stays in its block, which torch counts as allocated; a larger one is split off
        (taken(12 * MIB) + freed(1) + taken(11 * MIB), 12 * MIB, 12 * MIB),
        (taken(12 * MIB) + freed(1) + taken(11 * MIB - 1024), 11 * MIB - 1024, 12 * MIB),
        # the smallest free block with room is used, so that the larger one has room for 40
        (taken(40 * MIB, 30 * MIB) + freed(1, 2) + taken(28 * MIB, 40 * MIB), 68 * MIB, 70 * MIB),
        # free neighbours are merged
        (
            taken(60 * MIB) + freed(1) + taken(*[20 * MIB] * 3) + freed(1, 3, 2) + taken(60 * MIB),
            *(60 * MIB, 60 * MIB),
        ),
        (taken(30 * MIB) + freed(1) + taken(30 * MIB, stream=1), 30 * MIB, 60 * MIB),  # each has its own
    ],
)
def test_requests_by_hand(requests: list[Request], allocated: float, reserved: int) -> None:
    allocator = CachingAllocator()
    allocator.repeat(requests)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (allocated, reserved)
