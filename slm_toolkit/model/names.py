"""The model that a user's word means: a preset, a size, a folder, a config.json, a hub id."""

import dataclasses
import re
from difflib import get_close_matches
from pathlib import Path

from slm_toolkit.base.user_files import exists, is_dir, is_file, json_of, read_text, typed_path
from slm_toolkit.config.run_config import SYNTHETIC, RunConfig
from slm_toolkit.model.from_config import spec_from_config, spec_from_config_file
from slm_toolkit.model.hub import check_hub, is_hub_id
from slm_toolkit.model.model_spec import PRESETS, ModelSpec, spec_from_size


def find_model(name: str) -> ModelSpec:
    """The model a user means: a preset, `slm-<size>`, a local folder or config.json, or a hub id.

    The config.json of a hub id comes from the hub or its cache; all else needs no network.
    Raises ValueError with a hint where nothing of the kind exists.
    """
    if name.lower() in PRESETS:
        return PRESETS[name.lower()]
    if size := re.fullmatch(r"slm-(\d+(?:\.\d+)?)([mb])", name.lower()):
        return spec_from_size(float(size[1]) / (1000 if size[2] == "m" else 1), name.lower())
    path = typed_path(name)
    if is_dir(path):
        return dataclasses.replace(spec_from_config_file(path / "config.json"), path=str(path))
    if path.suffix == ".json" or is_file(path):
        return spec_from_config_file(path)
    if is_hub_id(name):
        return _spec_from_hub(name)
    raise ValueError(
        f"unknown model {name!r}\nhint: {_meant(name)}There are {', '.join(PRESETS)}; any size as slm-700m; "
        "a folder or config.json; a hub id such as HuggingFaceTB/SmolLM2-135M"
    )


def _meant(name: str) -> str:
    """`did you mean slm-1m? ` of slm1m, empty where nothing is close."""
    typed = re.sub(r"[\s_]+", "-", name.lower())
    size = re.fullmatch(r"slm-?(\d+(?:\.\d+)?[mb])", typed)
    close = [f"slm-{size[1]}"] if size else get_close_matches(typed, PRESETS, n=1, cutoff=0.7)
    return f"did you mean {close[0]}? " if close else ""


def has_weights(spec: ModelSpec) -> bool:
    """Whether training starts from weights: those of a folder that holds some, or of the hub."""
    if spec.path is None or spec.path.endswith(".json"):  # a configuration alone
        return False
    folder = typed_path(spec.path)
    return not exists(folder) or any([*folder.glob("*.safetensors"), *folder.glob("pytorch_model*.bin")])


def check_adapter_base(config: RunConfig, spec: ModelSpec) -> None:
    """Raises ValueError where an adapter of random weights would learn from documents, or be saved.

    On synthetic tokens, and in a rehearsal, such a run measures speed and memory.
    """
    measures_only = config.dataset == SYNTHETIC and not config.save_final_model
    if config.peft == "none" or config.rehearse is not None or measures_only or has_weights(spec):
        return
    reason = f"{spec.path} holds no weights" if spec.path else f"the weights of preset {spec.name} are random"
    helps = (
        f"--model {spec.hub_id} has them"
        if spec.hub_id
        else "--model takes a folder with weights or a hub id"
    )
    raise ValueError(
        f"--peft {config.peft}: {reason}, and an adapter of random weights is useless\n"
        f"hint: {helps}; synthetic tokens measure speed and memory without weights"
    )


def _spec_from_hub(hub_id: str) -> ModelSpec:
    from huggingface_hub import constants, hf_hub_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    check_hub(hub_id, "model")
    try:
        path = Path(hf_hub_download(hub_id, "config.json"))
    except GatedRepoError:
        raise ValueError(
            f"model {hub_id!r} is gated\n"
            f"hint: accept its terms at {constants.ENDPOINT}/{hub_id}, then `hf auth login` or HF_TOKEN"
        ) from None
    except RepositoryNotFoundError:
        raise ValueError(
            f"the hub has no model {hub_id!r}, or it is private\n"
            f"hint: check the name, or use a preset: {', '.join(PRESETS)}"
        ) from None
    except (OSError, ValueError) as error:
        raise ValueError(
            f"can't get model {hub_id!r} from the hub: {str(error).splitlines()[0]}\n"
            f"hint: check the name and the network, or use a preset: {', '.join(PRESETS)}"
        ) from None
    text = read_text(path, what="the model configuration", hint="give a folder with config.json")
    config = json_of(text, path, hint="is the cached copy whole?")
    return spec_from_config(config, name=hub_id.split("/")[-1].lower(), path=hub_id)
