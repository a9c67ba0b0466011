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


@dataclass(slots=True, eq=False)
class Block:
    """A part of a segment: in use, or free. Free neighbours are always merged."""

    address: int
    size_bytes: int
    stream: int
    is_small: bool
    is_free: bool = False
    previous: "Block | None" = None
    next: "Block | None" = None


class CachingAllocator:
    """Allocate and free as PyTorch does. A segment stays reserved, so `reserved_bytes` is its own peak."""

    def __init__(self) -> None:
        self.allocated_bytes = self.reserved_bytes = 0
        self._next_address = 0
        self._free_blocks: dict[tuple[bool, int], list[tuple[int, int, Block]]] = {}
        "by pool and stream, sorted by size and address"

    def allocate(self, num_bytes: int, stream: int = 0) -> Block:
        """Return a block for `num_bytes`."""
        size = _rounded(num_bytes)
        is_small = size <= SMALL_BYTES
        block = self._best_fit(size, is_small, stream) or self._new_segment(size, is_small, stream)
        rest = block.size_bytes - size
        if rest >= MIN_BLOCK_BYTES if is_small else rest > SMALL_BYTES:
            self._split(block, size)
        block.is_free = False
        self.allocated_bytes += block.size_bytes
        return block

    def free(self, block: Block) -> None:
        """Make a block free, merged with free neighbours. Its segment stays reserved."""
        self.allocated_bytes -= block.size_bytes
        before, after = block.previous, block.next
        if before is not None and before.is_free:
            self._forget(before)
            block.address, block.size_bytes = before.address, block.size_bytes + before.size_bytes
            block.previous = before.previous
            if block.previous is not None:
                block.previous.next = block
        if after is not None and after.is_free:
            self._forget(after)
            block.size_bytes += after.size_bytes
            block.next = after.next
            if block.next is not None:
                block.next.previous = block
        self._keep(block)

    def repeat(self, requests: Iterable[Request]) -> None:
        """Carry out the requests in order."""
        blocks: dict[int, Block] = {}
        for action, number, *size_and_stream in requests:
            if action == "a":
                blocks[number] = self.allocate(*size_and_stream)
            else:
                self.free(blocks.pop(number))

    def _best_fit(self, size: int, is_small: bool, stream: int) -> Block | None:
        """Return the smallest free block of this pool and stream that has room."""
        blocks = self._free_blocks.get((is_small, stream), [])
        index = bisect_left(blocks, (size,))
        return None if index == len(blocks) else blocks.pop(index)[2]

    def _new_segment(self, size: int, is_small: bool, stream: int) -> Block:
        segment_bytes = _segment_bytes(size)
        self.reserved_bytes += segment_bytes
        block = Block(self._next_address, segment_bytes, stream, is_small)
        self._next_address += segment_bytes
        return block

    def _split(self, block: Block, size: int) -> None:
        """Keep the first `size` bytes of the block; the rest becomes a free block."""
        rest = Block(block.address + size, block.size_bytes - size, block.stream, block.is_small)
        rest.previous, rest.next = block, block.next
        if block.next is not None:
            block.next.previous = rest
        block.next, block.size_bytes = rest, size
        self._keep(rest)

    def _keep(self, block: Block) -> None:
        block.is_free = True
        blocks = self._free_blocks.setdefault((block.is_small, block.stream), [])
        insort(blocks, (block.size_bytes, block.address, block))

    def _forget(self, block: Block) -> None:
        blocks = self._free_blocks[block.is_small, block.stream]
        del blocks[bisect_left(blocks, (block.size_bytes, block.address))]


def _rounded(num_bytes: int) -> int:
    return max(MIN_BLOCK_BYTES, -(-num_bytes // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES)


def _segment_bytes(size: int) -> int:
    """Return the bytes of the segment that PyTorch asks the GPU for, to allocate `size` bytes."""
    if size <= SMALL_BYTES:
        return SMALL_SEGMENT_BYTES
    if size < MIN_LARGE_BYTES:
        return LARGE_SEGMENT_BYTES
    return -(-size // ROUND_LARGE_BYTES) * ROUND_LARGE_BYTES
