"""Find the model that a user names: a preset, a size, a folder, a config.json or a model of the hub."""

import dataclasses
import os
import re
import sys
import threading
from contextlib import suppress
from difflib import get_close_matches
from functools import cache
from pathlib import Path

from slm_toolkit.base.user_files import exists, is_dir, is_file, json_of, read_text, typed_path
from slm_toolkit.config.dataset_files import is_saved_dataset, local_files
from slm_toolkit.config.run_config import SYNTHETIC, RunConfig
from slm_toolkit.model.from_config import spec_from_config, spec_from_config_file
from slm_toolkit.model.model_spec import NUM_BYTE_TOKENS, PRESETS, ModelSpec, spec_from_size


def find_model(name: str) -> ModelSpec:
    """Return the ModelSpec of a preset, `slm-<size>`, a local folder or config.json, or a hub id.

    Only a hub id needs the network: its config.json comes from the hub or its cache.
    Raise ValueError with a hint if there is no such model.
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
        f"unknown model {name!r}\nhint: {_suggestion(name)}There are {', '.join(PRESETS)}; any size, such as "
        "slm-700m; a folder or config.json; a hub id such as HuggingFaceTB/SmolLM2-135M"
    )


def _suggestion(name: str) -> str:
    """Return `did you mean slm-1m? ` for slm1m, or "" if no preset has a similar name."""
    typed = re.sub(r"[\s_]+", "-", name.lower())
    size = re.fullmatch(r"slm-?(\d+(?:\.\d+)?[mb])", typed)
    close = [f"slm-{size[1]}"] if size else get_close_matches(typed, PRESETS, n=1, cutoff=0.7)
    return f"did you mean {close[0]}? " if close else ""


def has_weights(spec: ModelSpec) -> bool:
    """Return whether training starts from saved weights; a hub model is assumed to have them."""
    if spec.path is None or spec.path.endswith(".json"):  # a configuration without weights
        return False
    folder = typed_path(spec.path)
    return not exists(folder) or any([*folder.glob("*.safetensors"), *folder.glob("pytorch_model*.bin")])


def check_adapter_base(config: RunConfig, spec: ModelSpec) -> None:
    """Raise ValueError if an adapter of random weights would be trained on documents, or saved.

    With synthetic tokens or in a rehearsal it is allowed: the run only measures speed and memory.
    """
    measures_only = config.dataset == SYNTHETIC and not config.saves_model
    if config.peft == "none" or config.rehearse is not None or measures_only or has_weights(spec):
        return
    reason = f"{spec.path} has no weights" if spec.path else f"the weights of preset {spec.name} are random"
    advice = (
        f"--model {spec.hub_id} has weights"
        if spec.hub_id
        else "give --model a folder with weights or a hub id"
    )
    raise ValueError(
        f"--peft {config.peft}: {reason}, and an adapter of random weights is useless\n"
        f"hint: {advice}; synthetic tokens measure speed and memory without weights"
    )


def tokenizer_of(config: RunConfig, spec: ModelSpec) -> str | None:
    """Return the folder or hub id of the tokenizer: --tokenizer_name's or the model's; None for bytes."""
    if config.tokenizer_name is not None:
        return None if config.tokenizer_name == "byte" else config.tokenizer_name
    if spec.path is None:
        return None
    folder = Path(spec.path).parent if spec.path.endswith(".json") else Path(spec.path)
    has_own = any((folder / file).is_file() for file in ("tokenizer.json", "tokenizer_config.json"))
    return str(folder) if has_own or not folder.exists() else None


def needs_tokenizer(spec: ModelSpec) -> bool:
    """Return whether the model reads text only with a --tokenizer_name: it has no tokenizer of its own."""
    return spec.vocab_size != NUM_BYTE_TOKENS and tokenizer_of(RunConfig(), spec) is None


def check_tokenizer(config: RunConfig, spec: ModelSpec) -> None:
    """Raise ValueError if text would be read as bytes by a model with another vocabulary."""
    reads_text = config.dataset != SYNTHETIC and config.dataset_format != "tokens"
    if not reads_text or config.tokenizer_name or config.rehearse is not None or not needs_tokenizer(spec):
        return
    known = [preset.hub_id for preset in PRESETS.values() if preset.vocab_size == spec.vocab_size]
    name = spec.hub_id or next(filter(None, known), "HUB_ID_OR_FOLDER")
    raise ValueError(
        f"--dataset {config.dataset}: model {spec.name} has {spec.vocab_size:,} tokens, but no tokenizer\n"
        f"hint: --tokenizer_name {name}; --tokenizer_name byte trains on bytes, {NUM_BYTE_TOKENS} of these "
        "tokens; rows of token ids need only --dataset_format tokens"
    )


def _spec_from_hub(hub_id: str) -> ModelSpec:
    from huggingface_hub import hf_hub_download

    check_hub(hub_id, "model")
    try:
        path = Path(hf_hub_download(hub_id, "config.json"))
    except (
        OSError,
        ValueError,
    ) as error:  # says if it is gated, absent or private
        reason = " ".join(str(error).split())
        raise ValueError(
            f"can't get model {hub_id!r} from the hub: {reason}\n"
            f"hint: check the name, `hf auth login` and the network, or use a preset: {', '.join(PRESETS)}"
        ) from None
    text = read_text(path, what="the model configuration", hint="give a folder with config.json")
    config = json_of(text, path, hint="the cached copy may be damaged: delete it and try again")
    return spec_from_config(config, name=hub_id.split("/")[-1].lower(), path=hub_id)


# The Hugging Face hub: whether it answers, and which of its models and datasets are cached here.

# time limit for the hub's first answer if HF_HUB_ETAG_TIMEOUT is not set; an answer usually takes 0.2 s
_SECONDS = 2.0


def is_hub_id(name: str) -> bool:
    """Return whether `name` has the form org/name; the caller must check that it is not a local path."""
    return re.fullmatch(r"[\w.-]+/[\w.-]+", name) is not None and not name.startswith(".")


def check_hub(hub_id: str, kind: str) -> None:
    """Raise ValueError if the hub does not answer and its cache has no `hub_id`.

    `kind` is model, tokenizer or dataset.
    """
    if (reason := why_offline()) is None:
        return
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    folder = repo_folder_name(repo_id=hub_id, repo_type="dataset" if kind == "dataset" else "model")
    made = Path(os.environ.get("HF_DATASETS_CACHE") or Path(constants.HF_HOME, "datasets")).expanduser()
    names = {_plain(path.name.replace("___", "/")) for path in made.glob("*___*") if kind == "dataset"}
    if not Path(constants.HF_HUB_CACHE, folder).is_dir() and _plain(hub_id) not in names:
        raise ValueError(
            f"{reason}, and there is no cached copy of the {kind} {hub_id!r}\n"
            "hint: download it once where there is a network, or give a file or folder of this machine"
        )
    _note_cached_copies(reason)


def check_hub_names(config: RunConfig) -> None:
    """Call `check_hub` for each dataset and tokenizer that is no file here, before anything is launched."""
    for source in (*config.sources, *config.eval_sources):
        if source.path != SYNTHETIC and not is_saved_dataset(source.path) and not local_files(source.path):
            check_hub(source.path, "dataset")
    tokenizer = config.tokenizer_name or "byte"
    if tokenizer != "byte" and not exists(typed_path(tokenizer)):
        check_hub(tokenizer, "tokenizer")


@cache
def why_offline() -> str | None:
    """Return None if the hub answers; else the reason, and let its libraries use their caches at once.

    The libraries would try again and again. This process and the processes that it starts get the setting.
    """
    from huggingface_hub import constants, get_session, is_offline_mode

    if is_offline_mode():
        return "HF_HUB_OFFLINE is set"
    seconds = float(os.environ.get("HF_HUB_ETAG_TIMEOUT") or _SECONDS)
    answers: list[object] = []

    def request_head() -> None:
        with suppress(Exception):  # each version of huggingface_hub has other errors
            answers.append(get_session().head(constants.ENDPOINT, timeout=seconds).status_code < 500)

    request = threading.Thread(target=request_head, daemon=True)
    request.start()
    request.join(seconds)  # a DNS lookup ignores the request's timeout
    if answers and answers[0]:
        return None
    os.environ["HF_HUB_OFFLINE"] = "1"  # for the processes that this process starts
    constants.HF_HUB_OFFLINE = True
    if "datasets" in sys.modules:  # it copied the constant when it was imported
        sys.modules["datasets"].config.HF_HUB_OFFLINE = True
    return f"can't reach {constants.ENDPOINT}"


@cache
def _note_cached_copies(reason: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(f"note: {reason}: using cached copies", file=sys.stderr)


def _plain(hub_id: str) -> str:
    """Return a hub id without capitals and underscores: the datasets library changes them in folder names."""
    return hub_id.lower().replace("_", "")
