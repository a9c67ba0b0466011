"""The model of PyTorch's caching allocator: blocks, segments and streams."""

from slm_toolkit.predict.memory.allocator import CachingAllocator

MIB = 2**20


def test_small_requests_share_segments_of_2_mib() -> None:
    allocator = CachingAllocator()
    for _ in range(2):
        allocator.allocate(600 * 1024)
    # 2 x 600 KiB of 2048 KiB; the third does not fit in the remaining 848 KiB less 600
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (1200 * 1024, 2 * MIB)
    allocator.allocate(900 * 1024)
    assert allocator.reserved_bytes == 4 * MIB


def test_bytes_are_rounded_to_512() -> None:
    allocator = CachingAllocator()
    for num_bytes in (1, 512, 513):
        allocator.allocate(num_bytes)
    assert allocator.allocated_bytes == 512 + 512 + 1024


def test_requests_below_10_mib_share_segments_of_20() -> None:
    allocator = CachingAllocator()
    allocator.allocate(9 * MIB)
    allocator.allocate(9 * MIB)
    assert allocator.reserved_bytes == 20 * MIB
    allocator.allocate(3 * MIB)  # 2 MiB are left
    assert allocator.reserved_bytes == 40 * MIB


def test_larger_requests_take_segments_of_their_own_in_steps_of_2_mib() -> None:
    allocator = CachingAllocator()
    allocator.allocate(21 * MIB // 2)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (21 * MIB // 2, 12 * MIB)


def test_a_rest_of_1_mib_or_less_stays_in_its_block() -> None:
    allocator = CachingAllocator()
    block = allocator.allocate(12 * MIB)
    allocator.free(block)
    whole = allocator.allocate(11 * MIB)
    # torch counts the whole block as allocated
    assert (whole.size_bytes, allocator.allocated_bytes) == (12 * MIB, 12 * MIB)
    allocator.free(whole)
    assert allocator.allocate(11 * MIB - 1024).size_bytes == 11 * MIB - 1024


def test_the_smallest_free_block_with_room_is_used() -> None:
    allocator = CachingAllocator()
    large, small = allocator.allocate(40 * MIB), allocator.allocate(30 * MIB)
    allocator.free(large)
    allocator.free(small)
    assert allocator.allocate(28 * MIB).address == small.address
    assert allocator.reserved_bytes == 70 * MIB


def test_free_neighbours_are_merged() -> None:
    allocator = CachingAllocator()
    parent = allocator.allocate(60 * MIB)
    allocator.free(parent)
    thirds = [allocator.allocate(20 * MIB) for _ in range(3)]
    for third in (thirds[0], thirds[2], thirds[1]):
        allocator.free(third)
    allocator.allocate(60 * MIB)
    assert allocator.reserved_bytes == 60 * MIB


def test_a_stream_does_not_use_the_blocks_of_another() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(30 * MIB, stream=0))
    allocator.allocate(30 * MIB, stream=1)
    assert allocator.reserved_bytes == 60 * MIB


def test_requests_are_repeated() -> None:
    allocator = CachingAllocator()
    allocator.repeat([("a", 1, 30 * MIB, 0), ("f", 1), ("a", 2, 28 * MIB, 0), ("a", 3, 5 * MIB, 2)])
    # the second has the first one's segment, the third a segment of 20 MiB in another stream
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (33 * MIB, 50 * MIB)
