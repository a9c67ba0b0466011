"""--pad_widths: the padded model computes the same, its padding stays zero, and it is saved without."""

import json
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from transformers import AutoModelForCausalLM

from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.model.families import kernel_problems
from slm_toolkit.model.model_spec import ModelSpec, padded_spec
from slm_toolkit.model.names import find_model
from slm_toolkit.run.model.model import build_model
from slm_toolkit.run.model.padding import config_without_padding, without_padding
from slm_toolkit.strategy.checked_run import contradictions
from slm_toolkit.strategy.strategy import find_strategy

MODELS = ROOT / "bench" / "data" / "models"
ODD = {"intermediate_size": 100, "vocab_size": 333}


def odd_model(name: str, folder: Path) -> ModelSpec:
    config = {**json.loads((MODELS / name / "config.json").read_text()), **ODD}
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return find_model(str(path))


def built(spec: ModelSpec, **flags: object) -> torch.nn.Module:
    asked = {"model": spec.name, "seq_len": 16, "numerics": "fp32", **flags}
    return build_model(spec, RunConfig(**asked).with_defaults(has_gpu=False))


def trained(model: torch.nn.Module) -> list[float]:
    """The losses of three steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    losses = []
    for seed in range(3):
        tokens = torch.randint(333, (2, 16), generator=torch.Generator().manual_seed(seed))
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("name", "kernel"),
    [
        *((name, "plain") for name in ("gemma3-2m", "smollm3-2m", "granite-2m", "falcon3-2m")),
        *((name, "loss") for name in ("olmo2-3m", "qwen3-2m")),
    ],
)
def test_a_padded_model_trains_as_without_and_its_padding_stays_zero(
    name: str, kernel: str, tmp_path: Path
) -> None:
    spec = odd_model(name, tmp_path)
    plain, padded = built(spec, kernels=kernel), built(spec, kernels=kernel, pad_widths=True)
    assert sum(param.numel() for param in padded.parameters()) == padded_spec(spec).num_params
    assert trained(padded) == pytest.approx(trained(plain), rel=2e-6)  # some roundings of 2^-24 = 6e-8
    whole = dict(padded.named_parameters())
    kept = dict(without_padding(padded, whole.items()))
    num_nonzero = {key: param.count_nonzero().item() for key, param in whole.items()}
    num_padded = 0
    for key, param in plain.named_parameters():
        # Adam divides by gradients that are as small as their roundings, so a weight may move otherwise
        assert (kept[key] - param).norm() < 1e-3 * param.norm()
        num_padded += whole[key].numel() - param.numel()
        assert num_nonzero[key] == kept[key].count_nonzero()
    # FFN 100 to 128; vocabulary 333 to 384
    assert num_padded == padded_spec(spec).num_params - spec.num_params > 0


def test_it_is_saved_as_the_model_that_was_asked_for(tmp_path: Path) -> None:
    spec = odd_model("qwen3-2m", tmp_path)
    model = built(spec, pad_widths=True)
    with config_without_padding(model):
        model.save_pretrained(tmp_path, state_dict=dict(without_padding(model, model.state_dict().items())))
    assert model.config.vocab_size == 384
    loaded, problems = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not problems["missing_keys"]
    assert not problems["mismatched_keys"]
    assert loaded.config.vocab_size == 333
    tokens = torch.arange(10).view(1, 10)
    with torch.no_grad():
        logits = model(input_ids=tokens).logits
        assert torch.equal(logits[..., 333:], torch.full((1, 10, 51), -torch.inf))
        torch.testing.assert_close(loaded(input_ids=tokens).logits, logits[..., :333])


def test_what_padding_would_change_is_refused(tmp_path: Path) -> None:
    config = RunConfig(pad_widths=True, attn_implementation="eager")
    for name, reason in (("gemma2-2m", "caps its logits"), ("phi3-2m", "gate and up in one matrix")):
        (problem,) = kernel_problems(odd_model(name, tmp_path), config)
        assert reason in problem
    assert "an adapter fits the unpadded model" in RunConfig(pad_widths=True, peft="lora").problems()[0]
    yaml = Path(find_strategy("ds_zero3").path).read_text().replace("init_flag: false", "init_flag: true")
    in_shards = tmp_path / "z.yaml"
    in_shards.write_text(yaml)
    (problem,) = contradictions(find_strategy(str(in_shards)), RunConfig(pad_widths=True))
    assert "the model is built in shards" in problem
