"""CheckedRun: the settings of a run, checked by one function that knows every contradiction between them."""

from dataclasses import dataclass
from typing import Any

from slm_toolkit.config.run_config import RunConfig
from slm_toolkit.model.families import kernel_problems
from slm_toolkit.model.from_config import check_trainable, position_problem
from slm_toolkit.model.model_spec import ModelSpec
from slm_toolkit.model.names import check_adapter_base
from slm_toolkit.strategy.deepspeed_optimizer import as_flags_say
from slm_toolkit.strategy.groups import parallel_problems
from slm_toolkit.strategy.strategy import Strategy, contradictions, launch_problems, passed_on_problems


@dataclass(frozen=True)
class CheckedRun:
    """A run whose settings don't contradict each other."""

    config: RunConfig
    spec: ModelSpec
    strategy: Strategy
    "without the optimizer and scheduler of a DeepSpeed JSON, which the flags replace"
    num_ranks: int
    taken_out: str | None
    "a line for the user that names what was removed from the JSON"


def run_problems(
    config: RunConfig,
    strategy: Strategy | None = None,
    spec: ModelSpec | None = None,
    *,
    num_ranks: int | None = None,
    **launch: Any,
) -> list[str]:
    """Return a sentence for each contradiction in the settings of a run. What is None is not checked.

    `launch`: what `contradictions` knows of the launch, `mixed_precision` and `has_gpu`.
    """
    problems = config.problems()
    if strategy is not None:
        problems += contradictions(strategy, config, num_processes=num_ranks, **launch)
        problems += parallel_problems(strategy, num_ranks=num_ranks)
    if spec is not None:
        problems += kernel_problems(spec, config)
        problems += filter(None, [position_problem(spec, config.seq_len)])
    return list(dict.fromkeys(problems))


def checked_run(
    config: RunConfig, spec: ModelSpec, strategy: Strategy, *, num_ranks: int, **launch: Any
) -> CheckedRun:
    """Return the run. Raises one ValueError with all `run_problems`, or for a model that can't be trained."""
    problems = [*passed_on_problems(strategy), *launch_problems(strategy, config)]
    problems += run_problems(config, strategy, spec, num_ranks=num_ranks, **launch)
    if problems:
        raise all_of(problems)
    check_trainable(spec, config)
    check_adapter_base(config, spec)
    strategy, taken_out = as_flags_say(strategy, config)
    return CheckedRun(config, spec, strategy, num_ranks, taken_out)


_USUAL_HINT = "`--help all` explains each flag"


def all_of(problems: list[str], *, verb: str | None = None) -> ValueError:
    """Return one error with all problems, each once, and the hints of those that have one."""
    usual = f"`slm {verb} --help all` explains each flag" if verb else _USUAL_HINT
    parted = [problem.partition("\nhint: ")[::2] for problem in problems]
    lines = dict.fromkeys(line for lines, _ in parted for line in lines.splitlines())
    hints = dict.fromkeys(hint for _, hint in parted if hint not in ("", _USUAL_HINT)) or [usual]
    return ValueError("\n".join(lines) + "\nhint: " + "; ".join(hints))
