"""`slm completion`: print a script with which bash or zsh completes verbs, flags and values."""

import argparse
import importlib.util
from pathlib import Path

from slm_toolkit.base.errors import pip_install, user_errors

_SHELLS = ("bash", "zsh")
_DESCRIPTION = """\
Print a script that completes the verbs, flags and values of `slm` when you press Tab. The script starts no
Python, so completion is fast. Print the script again after you update slm_toolkit."""
_EXAMPLES = """\
  slm completion bash                 print the script
  slm completion bash > slm.bash      then, in ~/.bashrc: source /path/to/slm.bash
  slm completion zsh > _slm           then move it to a folder of $fpath
"""


def fill(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `slm completion`."""
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
    """Return the completion script for `shell`, one of _SHELLS. Needs shtab."""
    import shtab

    from slm_toolkit.cli.main import _parser
    from slm_toolkit.hardware.gpus import gpus
    from slm_toolkit.model.model_spec import PRESETS
    from slm_toolkit.strategy.strategy import shipped_strategies

    parser = _parser()  # this parser parses nothing, so the `choices` set below only suggest values
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
