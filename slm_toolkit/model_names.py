"""The model that a user's word means: a preset, a size, a folder, a config.json, a hub id."""

import dataclasses
import re
from difflib import get_close_matches

from slm_toolkit.model_configs import spec_from_config, spec_from_config_file
from slm_toolkit.models import PRESETS, ModelSpec, spec_from_size
from slm_toolkit.user_files import exists, is_dir, is_file, typed_path


def find_model(name: str) -> ModelSpec:
    """The model a user means: a preset, `slm-<size>`, a local folder or config.json, or a hub id.

    A hub id's shape is asked of the hub (`load_hub_config` in transformers), all else needs no network.
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


def is_hub_id(name: str) -> bool:
    """True for `org/name` where no such file or folder is here: only the hub can know it."""
    looks_so = re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not name.startswith((".", "/"))
    return bool(looks_so) and not name.endswith(".json") and not exists(typed_path(name))


def _meant(name: str) -> str:
    """`did you mean slm-1m? ` of slm1m, empty where nothing is close."""
    typed = re.sub(r"[\s_]+", "-", name.lower())
    size = re.fullmatch(r"slm-?(\d+(?:\.\d+)?[mb])", typed)
    close = [f"slm-{size[1]}"] if size else get_close_matches(typed, PRESETS, n=1, cutoff=0.7)
    return f"did you mean {close[0]}? " if close else ""


def _spec_from_hub(hub_id: str) -> ModelSpec:
    from transformers import AutoConfig  # 3 s: only where a hub id asks for it

    try:
        config = AutoConfig.from_pretrained(hub_id, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"can't get model {hub_id!r} from the hub: {str(error).splitlines()[0]}\n"
            f"hint: check the name and the network, or use a preset: {', '.join(PRESETS)}"
        ) from None
    return spec_from_config(config.to_dict(), name=hub_id.split("/")[-1].lower(), path=hub_id)
