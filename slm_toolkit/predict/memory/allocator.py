"""A small model of PyTorch's caching allocator: the bytes that a sequence of allocations reserves on a GPU.

The rules are those of c10/cuda/CUDACachingAllocator.cpp of torch 2.13, with its default settings or with
expandable segments.
`bench/torch_allocator/compare.py` runs traced steps through torch's own compiled allocator and through this
one: they reserve the same bytes.
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
_ADDRESSES_OF_A_SEGMENT = 2**50


Request = tuple[str, int] | tuple[str, int, int, int]
"""("a", number, bytes, stream) allocates a block and names it by a number; ("f", number) frees it"""


class OutOfGpuMemory(Exception):
    """The GPU has no room for an allocation, even after all unused segments were freed."""


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

    @property
    def is_whole_segment(self) -> bool:
        return self.previous is None and self.next is None


class CachingAllocator:
    """Allocate and free as PyTorch does. `limit_bytes` is the most that it may reserve; None: no limit.

    With `expandable_segments`, each pool of each stream has one segment that grows at its end. A limit is not
    supported then.
    """

    def __init__(self, limit_bytes: int | None = None, *, expandable_segments: bool = False) -> None:
        assert limit_bytes is None or not expandable_segments
        self.limit_bytes = limit_bytes
        self.expandable_segments = expandable_segments
        self.allocated_bytes = self.peak_allocated_bytes = 0
        self.reserved_bytes = self.peak_reserved_bytes = 0
        self.num_retries = 0
        "how often all unused segments were freed, because the GPU was full: num_alloc_retries"
        self._next_address = 0
        self._free_blocks: dict[tuple[bool, int], list[tuple[int, int, Block]]] = {}
        "by pool and stream, sorted by size and address"
        self._last_blocks: dict[tuple[bool, int], Block] = {}
        "of each expandable segment, by pool and stream"

    def allocate(self, num_bytes: int, stream: int = 0) -> Block:
        """Return a block for `num_bytes`. Raise OutOfGpuMemory if the limit leaves no room for it."""
        size = _rounded(num_bytes)
        is_small = size <= SMALL_BYTES
        add = self._expand_segment if self.expandable_segments else self._new_segment
        block = self._best_fit(size, is_small, stream) or add(size, is_small, stream)
        rest = block.size_bytes - size
        if rest >= MIN_BLOCK_BYTES if is_small or self.expandable_segments else rest > SMALL_BYTES:
            self._split(block, size)
        block.is_free = False
        self.allocated_bytes += block.size_bytes
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
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
            self._replace_last(after, block)
        self._keep(block)

    def repeat(self, requests: Iterable[Request]) -> None:
        """Carry out the requests in order."""
        blocks: dict[int, Block] = {}
        for action, number, *size_and_stream in requests:
            if action == "a":
                blocks[number] = self.allocate(*size_and_stream)
            else:
                self.free(blocks.pop(number))

    def free_unused_segments(self) -> None:
        """Give segments without a block in use back to the GPU: `torch.cuda.empty_cache()`."""
        for blocks in self._free_blocks.values():
            kept = [entry for entry in blocks if not entry[2].is_whole_segment]
            self.reserved_bytes -= sum(size for size, *_ in blocks) - sum(size for size, *_ in kept)
            blocks[:] = kept

    def _best_fit(self, size: int, is_small: bool, stream: int) -> Block | None:
        """Return the smallest free block of this pool and stream that has room."""
        blocks = self._free_blocks.get((is_small, stream), [])
        index = bisect_left(blocks, (size,))
        if index == len(blocks):
            return None
        # an expandable segment's last block counts as endless
        is_last = blocks[index][2] is self._last_blocks.get((is_small, stream))
        return blocks.pop(index + (is_last and index + 1 < len(blocks)))[2]

    def _new_segment(self, size: int, is_small: bool, stream: int) -> Block:
        segment_bytes = _segment_bytes(size)
        if self._is_over(segment_bytes):
            self.free_unused_segments()
            self.num_retries += 1
            if self._is_over(segment_bytes):
                raise OutOfGpuMemory(f"no room for {size} bytes in {self.limit_bytes}")
        self.reserved_bytes += segment_bytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        block = Block(self._next_address, segment_bytes, stream, is_small)
        self._next_address += segment_bytes
        return block

    def _expand_segment(self, size: int, is_small: bool, stream: int) -> Block:
        """Return a free block at the end of the segment, which grows by whole pages."""
        last = self._last_blocks.get((is_small, stream))
        free = last if last is not None and last.is_free else None
        page_bytes = SMALL_SEGMENT_BYTES if is_small else LARGE_SEGMENT_BYTES
        missing_bytes = size - (free.size_bytes if free else 0)
        added_bytes = -(-missing_bytes // page_bytes) * page_bytes
        self.reserved_bytes += added_bytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        if free is not None:
            self._forget(free)
            free.size_bytes += added_bytes
            return free
        if last is None:  # far from all other segments
            address = len(self._last_blocks) * _ADDRESSES_OF_A_SEGMENT
        else:
            address = last.address + last.size_bytes
        block = Block(address, added_bytes, stream, is_small, previous=last)
        if last is not None:
            last.next = block
        self._last_blocks[is_small, stream] = block
        return block

    def _replace_last(self, old: Block, new: Block) -> None:
        """Make `new` the last block of its expandable segment if `old` was."""
        if self._last_blocks.get((old.is_small, old.stream)) is old:
            self._last_blocks[old.is_small, old.stream] = new

    def _is_over(self, segment_bytes: int) -> bool:
        return self.limit_bytes is not None and self.reserved_bytes + segment_bytes > self.limit_bytes

    def _split(self, block: Block, size: int) -> None:
        """Keep the first `size` bytes of the block; the rest becomes a free block."""
        rest = Block(block.address + size, block.size_bytes - size, block.stream, block.is_small)
        rest.previous, rest.next = block, block.next
        if block.next is not None:
            block.next.previous = rest
        block.next, block.size_bytes = rest, size
        self._replace_last(block, rest)
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
