"""A training run's flags, read and checked before torch is imported: what is wrong there is said at once."""

from collections.abc import Sequence

try:
    import resource
except ImportError:  # Windows
    resource = None

from slm_toolkit.base.errors import user_errors
from slm_toolkit.base.user_files import exists, typed_path
from slm_toolkit.config.dataset_files import is_saved_dataset, local_files
from slm_toolkit.config.flags import add_flags, config_from_args
from slm_toolkit.config.parser import Parser, with_underscores
from slm_toolkit.config.run_config import SYNTHETIC, RunConfig
from slm_toolkit.model.from_config import check_trainable
from slm_toolkit.model.hub import is_hub_id
from slm_toolkit.model.names import check_adapter_base, find_model
from slm_toolkit.strategy.strategy import Strategy, contradictions

MODULE = "slm_toolkit.train"
_FEWEST_OPEN_FILES = 64
"twice what two ranks need on a CPU; with too few, torch's ranks wait an hour for each other without a word"


def training_config(words: list[str]) -> RunConfig:
    """The RunConfig of the words after `-m slm_toolkit.train`; ends with exit code 2 for unknown flags."""
    parser = Parser(
        prog=f"python -m {MODULE}",
        description="Train one configuration, under `accelerate launch` or `slm train`, and record it.",
    )
    add_flags(parser, grid=False)
    return config_from_args(parser.parse_args(with_underscores(words)))


def check_command_line(words: list[str]) -> None:
    """End with one line and exit code 2 for what `check_training` finds; `--help` ends here, too."""
    with user_errors():
        check_training([training_config(words)])


def check_training(configs: list[RunConfig], strategies: Sequence[Strategy] = ()) -> None:
    """Raises ValueError for flags that make no sense, alone or under a strategy, and for models, datasets and
    tokenizers that are not there. The hub is not asked: what may be a hub id passes."""
    _check_open_files()
    configs = [config.with_defaults(has_gpu=False) for config in configs]  # the machine decides nothing here
    problems = [problem for config in configs for problem in config.problems()]
    problems += [
        problem for config in configs for each in strategies for problem in contradictions(each, config)
    ]
    if problems:
        hint = "`--help` explains each flag"
        if any("the DeepSpeed JSON says" in problem for problem in problems):
            hint = 'write "auto" in the JSON, and let the flags say it'
        raise ValueError("\n".join(dict.fromkeys(problems)) + f"\nhint: {hint}")
    specs = {name: find_model(name) for name in {config.model for config in configs} if _is_here(name)}
    for spec in specs.values():
        check_trainable(spec)
    for config in configs:
        if config.model in specs:
            check_adapter_base(config, specs[config.model])
    if configs[0].rehearse is None:  # a rehearsal may name the cluster's files
        _check_files(configs[0])


def _check_open_files() -> None:
    if resource is None:
        return
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < _FEWEST_OPEN_FILES:  # below 0: no limit
        raise ValueError(f"only {soft} files may be open at once in this shell\nhint: `ulimit -n 1024`")


def _is_here(model: str) -> bool:
    """False for what only the hub can know: `org/name` where no such file or folder is here."""
    return not is_hub_id(model) or model.endswith(".json") or exists(typed_path(model))


def _check_files(config: RunConfig) -> None:
    for source in (*config.sources, *config.eval_sources):
        if source.path != SYNTHETIC and not is_saved_dataset(source.path):
            local_files(source.path)
    name = config.tokenizer_name or "byte"
    if (name[0] in "./~" or name.count("/") > 1) and not exists(typed_path(name)):
        raise ValueError(f"no such tokenizer folder: {name}\nhint: --tokenizer_name byte needs none")
