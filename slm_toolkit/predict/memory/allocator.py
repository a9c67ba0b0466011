"""A small model of PyTorch's caching allocator: the bytes that a sequence of allocations reserves on a GPU.

The rules are those of c10/cuda/CUDACachingAllocator.cpp of torch 2.13 with its default settings, on a GPU
that is never full. On 2026-11-25 traced steps ran through torch's own compiled allocator and through this
one: they reserved the same bytes.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass

# names and values of CUDACachingAllocator.cpp (the first is kMinBlockSize)
MIN_BLOCK_BYTES = 512
SMALL_BYTES = 2**20  # kSmallSize: requests up to it come from the pool of small blocks
SMALL_SEGMENT_BYTES = 2 * 2**20  # kSmallBuffer
MIN_LARGE_BYTES = 10 * 2**20  # kMinLargeAlloc: smaller requests share a segment of kLargeBuffer
LARGE_SEGMENT_BYTES = 20 * 2**20  # kLargeBuffer
ROUND_LARGE_BYTES = 2 * 2**20  # kRoundLarge


Request = tuple[str, int] | tuple[str, int, int, int]
"""("a", number, bytes, stream) allocates a block and names it by a number; ("f", number) frees it"""


@dataclass(frozen=True)
class Block:
    """A part of a segment that is in use."""

    address: int
    size_bytes: int
    pool: tuple[bool, int]
    "whether it is of the pool of small blocks, and its stream"


class CachingAllocator:
    """Allocate and free as PyTorch does. A segment stays reserved, so `reserved_bytes` is its own peak."""

    def __init__(self) -> None:
        self.allocated_bytes = self.reserved_bytes = 0
        self._next_address = 0
        self._free: dict[tuple[bool, int], list[tuple[int, int]]] = {}
        "size and address of free blocks by pool, sorted; free neighbours are always merged"
        self._ends: dict[int, int] = {}
        self._starts: dict[int, int] = {}
        "the other end of each free block, by its start and by its end"

    def allocate(self, num_bytes: int, stream: int = 0) -> Block:
        """Return a block for `num_bytes`: of the smallest free block with room, or of a new segment."""
        size = _rounded(num_bytes)
        is_small = size <= SMALL_BYTES
        pool = is_small, stream
        free = self._free.setdefault(pool, [])
        if (index := bisect_left(free, (size,))) < len(free):
            found, address = free[index]
            self._forget(pool, address)
        else:
            found, address = _segment_bytes(size), self._next_address
            self.reserved_bytes += found
            self._next_address += found + 1  # neighbours in two segments are never merged
        rest = found - size
        if rest >= MIN_BLOCK_BYTES if is_small else rest > SMALL_BYTES:
            self._keep(pool, address + size, rest)
        else:
            size = found
        self.allocated_bytes += size
        return Block(address, size, pool)

    def free(self, block: Block) -> None:
        """Make a block free, merged with free neighbours. Its segment stays reserved."""
        self.allocated_bytes -= block.size_bytes
        start, end = block.address, block.address + block.size_bytes
        if (after := self._ends.get(end)) is not None:
            self._forget(block.pool, end)
            end = after
        if (before := self._starts.get(start)) is not None:
            self._forget(block.pool, before)
            start = before
        self._keep(block.pool, start, end - start)

    def repeat(self, requests: Iterable[Request]) -> None:
        """Carry out the requests in order."""
        blocks: dict[int, Block] = {}
        for action, number, *size_and_stream in requests:
            if action == "a":
                blocks[number] = self.allocate(*size_and_stream)
            else:
                self.free(blocks.pop(number))

    def _keep(self, pool: tuple[bool, int], start: int, size: int) -> None:
        insort(self._free[pool], (size, start))
        self._ends[start], self._starts[start + size] = start + size, start

    def _forget(self, pool: tuple[bool, int], start: int) -> None:
        end = self._ends.pop(start)
        del self._starts[end]
        self._free[pool].remove((end - start, start))


def _rounded(num_bytes: int) -> int:
    return max(MIN_BLOCK_BYTES, -(-num_bytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES)


def _segment_bytes(size: int) -> int:
    """Return the bytes of the segment that PyTorch asks the GPU for, to allocate `size` bytes."""
    if size <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if size < MIN_LARGE_BYTES:
        return LARGE_SEGMENT_BYTES
    return -(-size // ROUND_LARGE_BYTES) * ROUND_LARGE_BYTES
