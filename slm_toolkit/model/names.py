"""What a user's words name: a preset, a size, a folder, a config.json, a model or dataset of the hub."""

import dataclasses
import os
import re
import sys
import threading
from difflib import get_close_matches
from functools import cache
from pathlib import Path

from slm_toolkit.base.user_files import exists, is_dir, is_file, json_of, read_text, typed_path
from slm_toolkit.config.dataset_files import FILE_FORMATS
from slm_toolkit.config.run_config import SYNTHETIC, RunConfig
from slm_toolkit.model.from_config import spec_from_config, spec_from_config_file
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


# The Hugging Face hub: whether it answers, and which of its models and datasets are cached here.

_SECONDS = 2.0
"to wait for the hub's first answer, unless HF_HUB_ETAG_TIMEOUT says otherwise; 0.2 s is usual"
_MOST_NAMED = 5
"cached copies that a hint names"


def is_hub_id(name: str) -> bool:
    """Whether `name` has the form org/name; a path of that form is for the caller to rule out."""
    return re.fullmatch(r"[\w.-]+/[\w.-]+", name) is not None and not name.startswith(".")


def check_hub(hub_id: str, kind: str) -> None:
    """Raises ValueError where neither the hub nor the cache has `hub_id`; kind: model, tokenizer or dataset.

    Where the hub does not answer, its libraries use cached copies from here on, without trying again.
    """
    reason = why_offline()
    if reason is None:
        return
    if not _is_cached(hub_id, kind):
        raise not_here(hub_id, kind)
    _note_cached_copies(reason)


def check_hub_datasets(config: RunConfig) -> None:
    """`check_hub` of every dataset that is no path, before anything is launched for it."""
    for source in (*config.sources, *config.eval_sources):
        is_file = Path(source.path).suffix.lower() in FILE_FORMATS
        if is_hub_id(source.path) and not is_file and not exists(typed_path(source.path)):
            check_hub(source.path, "dataset")


def not_here(hub_id: str, kind: str) -> ValueError:
    """The error for what is neither on the hub, which does not answer, nor in the cache."""
    preset = preset_of(hub_id) if kind == "model" else None
    helps = [f"--model {preset} has the same shape, with random weights"] if preset is not None else []
    if names := [name for name in _cached(kind) if "/" in name]:
        more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
        helps.append(f"cached {kind}s: {', '.join(names[:_MOST_NAMED])}{more}")
    helps = helps or [f"a {'file' if kind == 'dataset' else 'folder'} on this machine needs no network"]
    return ValueError(
        f"{why_offline()}, and there is no cached copy of the {kind} {hub_id!r}\nhint: {'; '.join(helps)}"
    )


def preset_of(hub_id: str) -> str | None:
    """The preset of a published model's name, its -Instruct and -Chat versions included."""
    name = re.sub(r"-(instruct|chat)(-.*)?$", "", hub_id.lower()).split("/")[-1]
    return name if name in PRESETS and PRESETS[name].hub_id is not None else None


@cache
def why_offline() -> str | None:
    """None where the hub answers; else the reason, and the hub's libraries are told to use their cache."""
    from huggingface_hub import constants, get_session, is_offline_mode

    if is_offline_mode():
        return "HF_HUB_OFFLINE is set"
    seconds = float(os.environ.get("HF_HUB_ETAG_TIMEOUT") or _SECONDS)
    answers: list[int] = []

    def ask() -> None:
        try:
            answers.append(get_session().head(constants.ENDPOINT, timeout=seconds).status_code)
        except Exception:  # of the HTTP client, which has changed its name from version to version
            return

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(seconds)  # looking up a host's name knows no time limit
    if answers and answers[0] < 500:
        return None
    os.environ["HF_HUB_OFFLINE"] = "1"  # for the processes that this one starts
    constants.HF_HUB_OFFLINE = True
    if "datasets" in sys.modules:  # it has copied the constant
        sys.modules["datasets"].config.HF_HUB_OFFLINE = True
    return f"can't reach {constants.ENDPOINT}"


@cache
def _note_cached_copies(reason: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(f"note: {reason}: using cached copies", file=sys.stderr)


def _is_cached(hub_id: str, kind: str) -> bool:
    return _plain(hub_id) in map(_plain, _cached(kind))


def _plain(hub_id: str) -> str:
    """Without what the datasets library changes in the names of its folders."""
    return hub_id.lower().replace("_", "")


def _cached(kind: str) -> list[str]:
    """Hub ids of which this machine has a copy."""
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    found = []
    if kind == "dataset":  # as the datasets library keeps them: org___name
        folder = Path(os.environ.get("HF_DATASETS_CACHE") or Path(constants.HF_HOME, "datasets"))
        found = [path.name.replace("___", "/") for path in folder.expanduser().glob("*") if path.is_dir()]
    try:
        repos = scan_cache_dir().repos
    except (CacheNotFound, OSError):
        return sorted(found)
    wanted = "dataset" if kind == "dataset" else "model"
    return sorted({*found, *(repo.repo_id for repo in repos if repo.repo_type == wanted and repo.nb_files)})
