"""`slm completion`: a script that completes verbs, flags and their values at the prompt of bash or zsh."""

import argparse
import importlib.util
from pathlib import Path

from slm_toolkit.base.errors import pip_install, user_errors

_SHELLS = ("bash", "zsh")
_DESCRIPTION = """\
Print a script that completes the verbs, flags and values of `slm` when you press Tab. The shell runs it
alone, without Python, so it answers at once. Print it again after an update."""
_EXAMPLES = """\
  slm completion bash                 print the script
  slm completion bash > slm.bash      then, in ~/.bashrc: source /path/to/slm.bash
  slm completion zsh > _slm           then move it to a folder of $fpath
"""


def fill(parser: argparse.ArgumentParser) -> None:
    """The flags of `slm completion`, and what it does."""
    parser.description, parser.examples = _DESCRIPTION, _EXAMPLES
    parser.add_argument("shell", choices=_SHELLS, help="the shell that will read the script")
    parser.set_defaults(verb=_completion)


def _completion(args: argparse.Namespace) -> int:
    with user_errors():
        if importlib.util.find_spec("shtab") is None:
            raise ValueError(f"shtab is not installed\nhint: {pip_install('completion')}")
    print(completion_script(args.shell), end="")
    return 0


def completion_script(shell: str) -> str:
    """The script of a shell in _SHELLS. Needs shtab."""
    import shtab

    from slm_toolkit.cli.main import _parser
    from slm_toolkit.hardware.gpus import gpus
    from slm_toolkit.model.model_spec import PRESETS
    from slm_toolkit.strategy.strategy import shipped_strategies

    parser = _parser()  # parses nothing, so `choices` below only suggest values
    gpu_names = [gpu.name for gpu in gpus()]
    suggested = {"strategy": shipped_strategies(), "model": list(PRESETS), "gpu": gpu_names}
    verbs = next(action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    for verb in verbs.choices.values():
        verb.fill()
        for action in verb._actions:
            action.choices = action.choices or suggested.get(action.dest)
            if action.type in (Path, str) and not action.choices:
                action.complete = shtab.DIRECTORY if action.metavar == "DIR" else shtab.FILE
    return shtab.complete(parser, shell)
