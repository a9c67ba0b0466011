"""AdamW and Lion over fp32 master weights."""

import pytest
import torch

from slm_toolkit.run.engine.optimizer import (
    CPU_CHUNK_ELEMENTS,
    AdamWWithMasterWeights,
    LionWithMasterWeights,
)
from slm_toolkit.run.kernels.moments import MOMENTS, create_moment, read_moment, write_moment

OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1, "fused": False, "foreach": True}


def train(param: torch.nn.Parameter, optimizer: torch.optim.Optimizer, gradients: list[torch.Tensor]) -> None:
    for gradient in gradients:
        param.grad = gradient.to(param.dtype)
        optimizer.step()


def some(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(4, 3, generator=generator).bfloat16().float() for _ in range(count)]


def test_the_first_step_by_hand() -> None:
    # Adam's first step moves a weight by lr against its sign: 1 - 0.1 * 0.5 * 1 (decay) - 0.1 * sign
    param = torch.nn.Parameter(torch.tensor([1.0, 1.0], dtype=torch.bfloat16))
    optimizer = AdamWWithMasterWeights([param], max_grad_norm=0, lr=0.1, weight_decay=0.5, eps=1e-12)
    param.grad = torch.tensor([3.0, -4.0], dtype=torch.bfloat16)
    optimizer.step()
    assert torch.allclose(optimizer.state[param]["master"], torch.tensor([0.85, 1.05]))
    assert optimizer.grad_norm.item() == 5.0  # 3-4-5
    assert param.dtype == torch.bfloat16
    assert torch.equal(param, optimizer.state[param]["master"].bfloat16())


def test_masters_move_as_torchs_fp32_adamw_does() -> None:
    start = torch.ones(4, 3)
    low, full = torch.nn.Parameter(start.bfloat16()), torch.nn.Parameter(start.clone())
    ours = AdamWWithMasterWeights([low], max_grad_norm=0, **OPTIONS)
    train(low, ours, some(20))
    train(full, torch.optim.AdamW([full], **OPTIONS), some(20))
    assert torch.equal(ours.state[low]["master"], full.detach())


def test_bf16_moments_are_those_of_fp32_rounded_after_each_step() -> None:
    # two steps by hand with beta1 0.5, beta2 0.5, gradients 1 and 1/256:
    # exp_avg 0.5, then 0.5 / 2 + 1 / 512 = 0.251953125, whose 8 bits are 0.251953125 itself (129 / 512);
    # exp_avg_sq 0.5, then 0.25 + 2^-17 = 0.25000763, rounded to 0.25
    low = torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    options = {"lr": 1e-2, "betas": (0.5, 0.5), "weight_decay": 0.0}
    ours = AdamWWithMasterWeights([low], max_grad_norm=0, moment_dtype=torch.bfloat16, **options)
    train(low, ours, [torch.ones(1), torch.full((1,), 1 / 256)])
    state = ours.state[low]
    assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.bfloat16
    assert state["master"].dtype == torch.float32
    assert (state["exp_avg"].item(), state["exp_avg_sq"].item()) == (0.251953125, 0.25)


def test_many_steps_too_small_for_bf16_still_add_up() -> None:
    low = torch.nn.Parameter(torch.ones(4, 3, dtype=torch.bfloat16))
    # 100 steps of 1e-4 make 0.01, bf16's step at 1 is 0.0039: rounding each step away would leave 1
    optimizer = AdamWWithMasterWeights([low], max_grad_norm=0, lr=1e-4, weight_decay=0.0)
    train(low, optimizer, [torch.ones(4, 3)] * 100)
    assert low.float().mean().item() == pytest.approx(0.99, abs=0.003)


def test_clipping_scales_all_gradients_to_the_norm_asked_for() -> None:
    clipped, scaled = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    ours = AdamWWithMasterWeights(
        [clipped], max_grad_norm=1.0, eps=1.0, lr=0.1
    )  # eps 1: scale matters to Adam
    theirs = torch.optim.AdamW([scaled], eps=1.0, lr=0.1)
    train(clipped, ours, [torch.tensor([3.0, 4.0])])
    train(scaled, theirs, [torch.tensor([0.6, 0.8])])
    assert torch.allclose(clipped, scaled, atol=1e-6)


def test_a_parameter_that_is_updated_in_pieces_is_the_one_updated_whole() -> None:
    start = torch.randn(3, CPU_CHUNK_ELEMENTS - 7, generator=torch.Generator().manual_seed(0)).bfloat16()
    params = [[torch.nn.Parameter(start.clone()), torch.nn.Parameter(start[0, :5].clone())] for _ in range(2)]
    optimizers = [
        AdamWWithMasterWeights(group, max_grad_norm=0.5, in_pieces=in_pieces, **OPTIONS)
        for group, in_pieces in zip(params, (False, True), strict=True)
    ]
    for step in range(3):
        for group, optimizer in zip(params, optimizers, strict=True):
            for param in group:
                generator = torch.Generator().manual_seed(step)
                param.grad = torch.randn(param.shape, generator=generator).bfloat16()
            optimizer.step()
    for whole, pieces in zip(*params, strict=True):
        assert optimizers[1].state[pieces]["step"] == 3
        for name in ("master", "exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(optimizers[1].state[pieces][name], optimizers[0].state[whole][name])
        assert torch.equal(pieces, optimizers[1].state[pieces]["master"].bfloat16())


def test_moments_in_8_bits_are_packed_after_each_step() -> None:
    start = torch.randn(6, 100, generator=torch.Generator().manual_seed(1))
    low, full = torch.nn.Parameter(start.bfloat16()), torch.nn.Parameter(start.bfloat16().float())
    gradients = [
        torch.randn(6, 100, generator=torch.Generator().manual_seed(step)).bfloat16() for step in range(4)
    ]
    ours = AdamWWithMasterWeights([low], max_grad_norm=0, moment_dtype=torch.uint8, **OPTIONS)
    train(low, ours, gradients)
    theirs = torch.optim.AdamW([full], **OPTIONS)
    for gradient in gradients:
        train(full, theirs, [gradient])
        for kind in MOMENTS:
            packed: dict[str, torch.Tensor] = {}
            create_moment(packed, kind, full, torch.uint8)
            write_moment(packed, kind, None, theirs.state[full][kind])
            theirs.state[full][kind].copy_(read_moment(packed, kind, None, torch.float32))
    state = ours.state[low]
    assert torch.equal(state["master"], full)
    # 600 elements: 600 bytes and 3 scales per moment, where fp32 has 4,800
    names = {"exp_avg": 600, "exp_avg_scales": 12, "exp_avg_sq": 600, "exp_avg_sq_scales": 12}
    assert {name: state[name].nbytes for name in names} == names


def test_a_weight_whose_gradient_ends_moves_no_farther_with_moments_in_8_bits() -> None:
    """Beside a large one in its block, its second moment is too small for 8 bits, its first is not."""
    moved = {}
    for dtype in (torch.float32, torch.uint8):
        param = torch.nn.Parameter(torch.zeros(2))
        options = {**OPTIONS, "lr": 1e-3, "weight_decay": 0.0}
        optimizer = AdamWWithMasterWeights([param], max_grad_norm=0, moment_dtype=dtype, **options)
        train(param, optimizer, [torch.tensor([1.0, 1e-4]), *[torch.tensor([1.0, 0.0])] * 3])
        moved[dtype] = param[1].item() / 1e-3
    # fp32: a step of 1 and the rest of its momentum. With a second moment of 0: about 0.1 x 1e-4 / 1e-8 steps
    assert -3 < moved[torch.float32] < -1
    assert -3 < moved[torch.uint8] < -1


def lion(param: torch.nn.Parameter, **options: object) -> LionWithMasterWeights:
    return LionWithMasterWeights([param], **{**OPTIONS, "max_grad_norm": 0, "lr": 0.01, **options})


def test_two_steps_of_lion_by_hand() -> None:
    # betas 0.9, 0.95; gradients 1 and -1: the first average is 0.1 and the moment 0.05; the second average
    # 0.9 x 0.05 - 0.1 = -0.055 and the moment 0.95 x 0.05 - 0.05 = -0.0025. A gradient of 0 moves nothing.
    param = torch.nn.Parameter(torch.tensor([1.0, 2.0], dtype=torch.bfloat16))
    optimizer = lion(param)
    train(param, optimizer, [torch.tensor([1.0, 0.0]), torch.tensor([-1.0, 0.0])])
    # decay 1 - 0.01 x 0.1 before each move of 0.01
    expected = torch.tensor([(1 * 0.999 - 0.01) * 0.999 + 0.01, 2 * 0.999**2])
    state = optimizer.state[param]
    assert sorted(state) == ["exp_avg", "master", "step"]  # 8 bytes per parameter, not AdamW's 12
    torch.testing.assert_close(state["master"], expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(state["exp_avg"], torch.tensor([-0.0025, 0.0]), rtol=1e-5, atol=0)
    assert torch.equal(param, state["master"].bfloat16())


def test_lion_moves_nothing_if_the_norm_is_not_finite() -> None:
    param = torch.nn.Parameter(torch.ones(4))
    optimizer = lion(param, max_grad_norm=1.0)
    train(param, optimizer, [torch.tensor([1.0, float("nan"), 0.0, 0.0])])
    assert torch.equal(param, torch.ones(4))


@pytest.mark.parametrize("kind", [AdamWWithMasterWeights, LionWithMasterWeights])
@pytest.mark.parametrize("moment_dtype", [None, torch.bfloat16, torch.uint8])
def test_flat_master_weights_of_deepspeed_move_as_ours(
    kind: type[AdamWWithMasterWeights], moment_dtype: torch.dtype | None
) -> None:
    """Two tensors of whole blocks, and one flat tensor of both, cut into chunks."""
    sizes = (512, CPU_CHUNK_ELEMENTS)
    generator = torch.Generator().manual_seed(0)
    start, *gradients = (torch.randn(sum(sizes), generator=generator) for _ in range(4))
    flat = torch.nn.Parameter(start.clone())
    parts = [torch.nn.Parameter(part.clone()) for part in start.split(sizes)]
    options = {**OPTIONS, "max_grad_norm": 0.0, "moment_dtype": moment_dtype, "in_pieces": True}
    of_flat, of_parts = kind([flat], under_deepspeed=True, **options), kind(parts, **options)
    for gradient in gradients:
        flat.grad = gradient.clone()
        for part, own in zip(parts, gradient.split(sizes), strict=True):
            part.grad = own.clone()
        of_flat.step()
        of_parts.step()
    assert torch.equal(flat, torch.cat(parts))
