"""What we lean on in peft, bitsandbytes, torchao, datasets and accelerate's loaders."""

from pathlib import Path
from typing import Any

import pytest
import torch
from drift import Leaning
from drift_models import small_llama


def _adapters() -> None:
    pytest.importorskip("peft")
    from peft import LoraConfig

    wanted = {"lora": ("lora_",)}
    for kind, config in (
        ("lora", LoraConfig(task_type="CAUSAL_LM", r=2, lora_alpha=4, target_modules=["q_proj"])),
    ):
        model = small_llama()
        before = set(model.state_dict())
        model.add_adapter(config)
        added = {name for name in model.state_dict() if ".base_layer." not in name} - before
        assert added, f"{kind} adds nothing"
        assert all(mark in name for name in added for mark in wanted[kind]), f"{kind} adds {added}"
        kept = {name.replace(".base_layer.", ".") for name in model.state_dict()} - added
        assert kept == before, f"the base of {kind} has other names: {sorted(kept ^ before)[:3]}"
        trained = [name for name, param in model.named_parameters() if param.requires_grad]
        assert set(trained) == added, f"{kind} trains {set(trained) ^ added}"


def _four_bits() -> None:
    pytest.importorskip("bitsandbytes")
    from bitsandbytes.functional import dequantize_4bit
    from bitsandbytes.nn import Linear4bit, Params4bit

    from slm_toolkit.run.model.adapters import quantize

    model = small_llama()
    whole = model.model.layers[0].mlp.up_proj.weight.detach().clone()
    quantize(model)
    module = model.model.layers[0].mlp.up_proj
    assert isinstance(module, Linear4bit)
    assert isinstance(module.weight, Params4bit)
    assert module.weight.dtype == torch.bfloat16, "quant_storage is not kept"
    back = dequantize_4bit(module.weight.data, module.weight.quant_state).float()
    assert back.shape == whole.shape
    likeness = torch.nn.functional.cosine_similarity(back.flatten(), whole.flatten(), dim=0)
    assert likeness > 0.95, f"4 bits stand for other weights: cosine {likeness:.3f}"
    marks = (".quant_", ".absmax", ".nested_")
    beside = [name for name in module.state_dict() if name != "weight"]
    assert beside, "scales are not in the state dict"
    assert all(any(mark in f".{name}" for mark in marks) for name in beside), beside
    module(torch.ones(1, 16, dtype=torch.bfloat16))
    assert module.quant_state is not None, "the module knows its scales no more"
    assert module.quant_state.absmax is not None


def _float8() -> None:
    pytest.importorskip("torchao")
    import dataclasses

    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    for recipe in ("tensorwise", "rowwise"):
        config = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)
        layers = torch.nn.ModuleList([torch.nn.Linear(16, 16), torch.nn.Linear(16, 10)])
        convert_to_float8_training(
            layers, config=config, module_filter_fn=lambda module, _: module.out_features == 16
        )
        kinds = [type(layer).__name__ for layer in layers]
        assert kinds == ["Float8Linear", "Linear"], f"{recipe}: {kinds}"
        assert [name for name, _ in layers[0].named_parameters()] == ["weight", "bias"]


def _datasets_files() -> None:
    import tempfile

    from datasets import Dataset, interleave_datasets, load_dataset, load_from_disk
    from datasets.exceptions import DatasetNotFoundError

    assert issubclass(DatasetNotFoundError, Exception)
    with tempfile.TemporaryDirectory() as folder:
        rows = Dataset.from_dict({"text": ["a", "b"]})
        rows.save_to_disk(f"{folder}/saved")
        assert (Path(folder) / "saved" / "state.json").is_file(), "save_to_disk leaves no state.json"
        assert load_from_disk(f"{folder}/saved")["text"][:] == ["a", "b"]
        for name in ("one", "two"):
            Path(folder, f"{name}.txt").write_text(f"{name}\n\nline")
        files = [f"{folder}/one.txt", f"{folder}/two.txt"]
        options = {"data_files": files, "sample_by": "document", "cache_dir": f"{folder}/cache"}
        texts = load_dataset("text", **options, split="train")
        assert [row["text"] for row in texts] == ["one\n\nline", "two\n\nline"], "a file is no document"
        mixed = interleave_datasets(
            [Dataset.from_dict({"n": [1]}), Dataset.from_dict({"n": [2, 2]})],
            **{"probabilities": [0.5, 0.5], "seed": 0, "stopping_strategy": "all_exhausted"},
        )
        _datasets_unpacks(Path(folder))
        assert {row["n"] for row in mixed} == {1, 2}
        assert len([1 for row in mixed if row["n"] == 2]) >= 2


def _datasets_unpacks(folder: Path) -> None:
    """What Extractor takes for packed is what load_dataset unpacks; a name with glob's characters escaped."""
    import glob
    import gzip

    from datasets import load_dataset
    from datasets.utils.extract import Extractor

    for name, data in (("packed.txt", gzip.compress(b"text")), ("[x].txt", b"text")):
        path = folder / name
        path.write_bytes(data)
        assert Extractor.infer_extractor_format(path) == ("gzip" if name == "packed.txt" else None)
        files = {"data_files": [glob.escape(str(path))], "cache_dir": f"{folder}/cache"}
        assert load_dataset("text", **files, split="train")["text"][:] == ["text"]


def _loaders() -> None:
    from accelerate import skip_first_batches
    from accelerate.data_loader import prepare_data_loader
    from torch.utils.data import DataLoader

    def batches(loader: Any) -> list[list[int]]:
        return [batch.tolist() for batch in loader]

    orders = []
    for rank in (0, 1):
        loader = prepare_data_loader(
            DataLoader(list(range(24)), batch_size=3, shuffle=True, drop_last=True),
            **{"num_processes": 2, "process_index": rank, "put_on_device": False},
            **{"dispatch_batches": False, "use_seedable_sampler": True},
        )
        assert loader.total_batch_size == 6
        assert len(loader) == 4  # 24 / (2 x 3)
        of_epoch = []
        for epoch in (0, 1, 0):
            loader.set_epoch(epoch)
            told = list(loader.batch_sampler)
            loader.set_epoch(epoch)
            of_epoch.append(batches(loader))
            assert told == of_epoch[-1], "batch_sampler tells other sequences than the batches hold"
        assert of_epoch[0] == of_epoch[2] != of_epoch[1], "set_epoch no longer decides the order"
        loader.set_epoch(1)
        assert batches(skip_first_batches(loader, 3)) == of_epoch[1][3:], "another rest is left"
        orders.append(of_epoch[0])
    seen = sorted(number for order in orders for batch in order for number in batch)
    assert seen == list(range(24)), f"two ranks see {seen}"


EXTRAS = (
    Leaning(
        "peft: names of an adapter's weights",
        ("lora_", ".base_layer.", "base_layer", "add_adapter"),
        "tell the base from the adapter",
        "run/checkpoint/output_dir.py: save_model",
        _adapters,
    ),
    Leaning(
        "bitsandbytes: weights of 4 bits",
        ("Params4bit", "Linear4bit", "quant_state", "absmax"),
        "quantize in bf16 storage, and give the weights back when merging",
        "run/model/adapters.py: quantize, `_without_scales`, `_dequantized`",
        _four_bits,
    ),
    Leaning(
        "torchao: float8 training",
        ("convert_to_float8_training", "Float8LinearConfig"),
        "multiply in float8, emulated where there is no such GPU",
        "run/kernels/layer_kernels.py: use_fp8",
        _float8,
    ),
    Leaning(
        "datasets: files it leaves and reads",
        ("load_from_disk", "interleave_datasets", "DatasetNotFoundError", "infer_extractor_format"),
        "read folders that it saved, a document per file, and mixtures; refuse what it would unpack",
        "run/data/sources.py, run/data/data.py",
        _datasets_files,
    ),
    Leaning(
        "accelerate: the order of a rank's batches",
        ("batch_sampler", "set_epoch", "skip_first_batches", "total_batch_size"),
        "resume in the middle of an epoch, and name the sequences of a bad step",
        "run/data/batches.py: endless and place_in_data; run/after_step.py: `_sequence_numbers`",
        _loaders,
    ),
)
