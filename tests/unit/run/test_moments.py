"""Moments in 8 bits: which values they keep, how near, and that nothing is lost twice."""

import pytest
import torch

from slm_toolkit.run.kernels.moments import MOMENTS, create_moment, read_moment, unpacked, write_moment

FIRST, SECOND = MOMENTS


def kept(kind: str, values: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The state with these values, and what it gives back."""
    state: dict[str, torch.Tensor] = {}
    create_moment(state, kind, values, torch.uint8)
    write_moment(state, kind, None, values)
    return state, read_moment(state, kind, None, torch.float32)


def spread(num_elements: int, kind: str) -> torch.Tensor:
    """Values over six powers of ten, of both signs for first moments."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(num_elements, generator=generator)
    values *= 10 ** (-6 * torch.rand(num_elements, generator=generator))
    return values if kind == FIRST else values.square()


def test_values_by_hand() -> None:
    # of each power of ten the fractions' middles are kept: between 0.1 and 1 at the power 1 there are 64 for
    # a first moment, 0.9 / 64 apart, the last of which is 1; 32 at 0.1. So 0.5 lies between 0.1 + 28.5 x
    # 0.0140625 = 0.50078 and 0.48672; 0.05 becomes 0.01 + 14.5 x 0.09 / 32 = 0.0507813 or 0.0479688
    _, back = kept(FIRST, torch.tensor([2.0, -2.0, 1.0, -0.1, 0.0, 1e-9]))
    expected = torch.tensor([2.0, -2.0, 2 * 0.50078125, -2 * 0.05078125, 0.0, 0.0])
    torch.testing.assert_close(back, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", MOMENTS)
@pytest.mark.parametrize("num_elements", [0, 1, 255, 256, 257, 10_000])
def test_what_was_kept_is_kept_again_as_it_is(kind: str, num_elements: int) -> None:
    state, once = kept(kind, spread(num_elements, kind))
    before = {name: tensor.clone() for name, tensor in state.items()}
    with unpacked(state):
        assert state[kind].dtype == torch.float32
        assert torch.equal(state[kind], once)
    assert all(torch.equal(state[name], tensor) for name, tensor in before.items())
    _, twice = kept(kind, once)
    assert torch.equal(twice, once)


@pytest.mark.parametrize("kind", MOMENTS)
def test_a_block_of_small_values_keeps_its_own_scale(kind: str) -> None:
    values = torch.cat([torch.ones(256), torch.full((256,), 1e-12), torch.zeros(256)])
    _, back = kept(kind, values)
    assert torch.equal(back, values)


def test_a_row_of_zeros_stays_zero_beside_others() -> None:
    """So that tokens that never came are not moved by their neighbours in a block."""
    values = torch.cat([torch.full((128,), 3.0), torch.zeros(128)])
    for kind in MOMENTS:
        assert not kept(kind, values)[1][128:].any()


def test_a_small_second_moment_does_not_become_zero() -> None:
    """1e-9 of the block's largest is below the smallest value, 3.25e-7 of it, to which it is raised."""
    _, back = kept(SECOND, torch.tensor([4.0, 4e-9, 0.0]))
    torch.testing.assert_close(back, torch.tensor([4.0, 1.3e-6, 0.0]), rtol=1e-6, atol=0)
    assert not kept(FIRST, torch.tensor([4.0, 4e-9, -4e-9]))[1][1:].any()  # nothing is divided by it


def test_values_are_near_what_they_were() -> None:
    """From 0.1 of the block's largest on, a step is 0.9 / 64 (0.9 / 128), of which half is lost at most."""
    for kind, step in ((FIRST, 0.9 / 64), (SECOND, 0.9 / 128)):
        values = torch.cat([torch.linspace(0.1, 0.97, 255), torch.ones(1)])  # the last step is longer
        _, back = kept(kind, values)
        # 0.1 % of the value: where between two values the table's index changes
        assert ((back - values).abs() <= step / 2 + 1e-3 * values).all()
        assert (back - values).abs().max() > 0.3 * step


def test_a_stretch_is_read_and_written_alone() -> None:
    values = spread(1024, FIRST)
    state, whole = kept(FIRST, values)
    part = slice(256, 600)
    assert torch.equal(read_moment(state, FIRST, part, torch.float32), whole[part])
    write_moment(state, FIRST, slice(256, 512), torch.zeros(256))
    after = read_moment(state, FIRST, None, torch.float32)
    assert not after[256:512].any()
    assert torch.equal(after[512:], whole[512:])
