"""The command line's parsers: short help, one-line errors with a hint, other trainers' names of flags.

The names are those of Hugging Face's Trainer and examples, accelerate, TRL, torchrun, DeepSpeed, torchtitan,
litgpt, nanoGPT, axolotl and LLaMA-Factory.
"""

import argparse
import re
import sys
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml

from slm_toolkit.base.user_files import read_text, typed_path, yaml_node, yaml_of

_OF_THE_LAUNCHER = (
    "this is a flag of the launch: `slm train` takes it; for `accelerate launch` put it before -m"
)


@cache
def foreign_flags(kind: str) -> dict[str, str]:
    """Return a section of foreign_flags.yaml: by the name of a flag, what to write instead."""
    path = Path(__file__).with_name("foreign_flags.yaml")
    texts = yaml_of(path.read_text(), path, hint="")[kind]
    return {name: text for names, text in texts.items() for name in names.split()}


_LAUNCHERS_OWN = ("strategy", "config_file", "num_processes", "num_machines", "machine_rank")
# switches of Trainer: our flag and its value; without --bf16 and with its false, our default stays
_SWITCHES = {
    "bf16": ("numerics", "aligned"),
    "fp16": ("numerics", "fp16"),
    "torch_compile": ("kernels", "compiled"),
}


class _Switch(argparse.Action):
    """`--fp16` or `--fp16 true` stores what our flag would store; `--fp16 false` stores nothing."""

    stored: Any
    "the value of our flag"

    def __call__(self, parser: Any, namespace: argparse.Namespace, value: Any, flag: Any = None) -> None:
        if value == "true":
            setattr(namespace, self.dest, self.stored)


def hint_for(words: list[str], known: Collection[str]) -> str:
    """Return hints for the unknown flags among `words`, in a parser with the flags `known`; may be empty.

    A YAML or JSON without a flag is probably a strategy.
    """
    if "--strategy" in known and words[0].endswith((".yaml", ".yml", ".json")):
        return f"did you mean --strategy {words[0]}?"
    flags = [word.partition("=")[0] for word in words if word.startswith("--")]
    return "; ".join(filter(None, (_hint(flag, known) for flag in dict.fromkeys(flags))))


def _hint(flag: str, known: Collection[str]) -> str:
    name = flag.removeprefix("--")
    if instead := foreign_flags("removed").get(name):
        return f"--{name} was removed: {instead}"
    text = foreign_flags("hints").get(name, "")
    if name in _LAUNCHERS_OWN and "--strategy" not in known:
        text = _OF_THE_LAUNCHER
    if text and "--seq_len" in known and all(word in known for word in re.findall(r"--\w+", text)):
        return text
    close = get_close_matches(flag, known, n=1, cutoff=0.7)
    return f"did you mean {close[0]}?" if close else ""


_CONFIG_HINT = "--config takes a YAML of flag names without -- and their values, such as learning_rate: 1e-3"


def with_config_files(words: list[str], actions: Mapping[str, argparse.Action]) -> list[str]:
    """The words, with those of each `--config FILE` before all others, so that flags of the command line win.

    Raises ValueError for a file that can't be read, a key that is no flag, or a value that no flag can take.
    """
    of_files, others = [], []
    ours = words.index("--") if "--" in words else len(words)
    left = iter(words[:ours])
    for word in left:
        name, equals, path = word.partition("=")
        if name != "--config":
            others.append(word)
        elif path := path if equals else next(left, ""):
            of_files += _words_of_file(path, actions)
        else:
            raise ValueError(f"--config without a file\nhint: {_CONFIG_HINT}")
    return of_files + others + words[ours:]


def _words_of_file(path: str, actions: Mapping[str, argparse.Action]) -> list[str]:
    text = read_text(typed_path(path), what="--config", hint=_CONFIG_HINT)
    node = yaml_node(text, path, hint=_CONFIG_HINT)
    if not isinstance(node, yaml.MappingNode):
        raise ValueError(f"{path} is not a mapping\nhint: {_CONFIG_HINT}")
    # values stay as they are written: YAML reads 1:12:00:00 as a number in base 60
    settings = [(str(key.value), _value_as_typed(value)) for key, value in node.value]
    return words_of(settings, actions, where=f"{path}: ", hint=_CONFIG_HINT)


def _value_as_typed(node: yaml.Node) -> Any:
    if isinstance(node, yaml.CollectionNode):
        is_list = isinstance(node, yaml.SequenceNode)
        return [_value_as_typed(value) for value in node.value] if is_list else {"a mapping"}
    return None if node.tag == "tag:yaml.org,2002:null" else node.value


def words_of(
    settings: list[tuple[str, Any]],
    actions: Mapping[str, argparse.Action],
    *,
    where: str = "",
    hint: str = "",
) -> list[str]:
    """Return the words of flags that are given by name with values.

    Raises ValueError, which begins with `where`, for an unknown name and a value that its flag can't take.
    """
    typed = [f"--{name.replace('-', '_')}" for name, _ in settings]
    if unknown := [flag for flag in typed if flag not in actions or flag in ("--help", "--config")]:
        hint = "; ".join(filter(None, (_hint(flag, actions) for flag in unknown))) or hint
        names = ", ".join(flag[2:] for flag in unknown)
        raise ValueError(f"{where}unknown {names}" + (f"\nhint: {hint}" if hint else ""))
    words, given = [], []
    for flag, (_, value) in zip(typed, settings, strict=True):
        action = actions[flag]
        of_setting = _words_of_setting(action.option_strings[0], value, action, where)
        words += of_setting
        given += [action.dest] * bool(of_setting)
    if twice := [name for name in dict.fromkeys(given) if given.count(name) > 1]:
        raise ValueError(f"{where}{', '.join(twice)} given twice\nhint: keep one value")
    return words


def _words_of_setting(flag: str, value: Any, action: argparse.Action, where: str) -> list[str]:
    """`--seed=1`, or `--seed 1 2` of a list; nothing for null, and for false if the flag is a switch."""
    is_switch, several = action.nargs == 0 or isinstance(action, _Switch), action.nargs in ("+", "*")
    values = list(value) if isinstance(value, list | tuple) else [value]
    texts = [str(each).lower() if isinstance(each, bool) else str(each) for each in values]
    switched = texts[0].lower() if is_switch and len(texts) == 1 else None
    if value is None or switched == "false":
        return []
    if switched == "true":
        return [flag]
    is_nested = any(isinstance(each, dict | list | set | None) for each in values)
    if is_switch or not values or is_nested or (isinstance(value, list | tuple) and not several):
        takes = "true or false" if is_switch else "a list of values" if several else "one value"
        raise ValueError(f"{where}{flag[2:]} is {value!r}\nhint: it takes {takes}")
    return [flag, *texts] if several else [f"{flag}={texts[0]}"]


def with_underscores(argv: list[str]) -> list[str]:
    """Spell `--seq-len` as `--seq_len`. Words after `--` or `-m` are another command's, and stay."""
    words = []
    ours = min((argv.index(mark) for mark in ("--", "-m") if mark in argv), default=len(argv))
    for word in argv[:ours]:
        name, equals, value = word.partition("=")
        words.append(
            name.replace("-", "_").replace("__", "--", 1) + equals + value if name[:2] == "--" else word
        )
    return words + argv[ours:]


class Parser(argparse.ArgumentParser):
    """argparse with two sizes of help and other trainers' names of flags; what is wrong raises ValueError.

    `--help` shows the flags whose action has `basic = True`, `--help all` shows every flag. A parser without
    basic flags has one help, which shows every flag.
    """

    examples = ""
    "three commands, shown by both sizes of help; `epilog` is shown by `--help all` alone"
    has_grid = False
    "whether flags of runs take several values"
    has_arguments = False
    "whether the words after `--` are the arguments of another program; then they are parsed as `arguments`"

    def __init__(self, *, has_config_file: bool = True, **options: Any) -> None:
        super().__init__(allow_abbrev=False, add_help=False, formatter_class=_HelpFormatter, **options)
        unset, text = argparse.SUPPRESS, "show this help, or every flag"
        options_of_help = {"nargs": "?", "metavar": "all", "dest": unset, "default": unset, "help": text}
        self.add_argument("-h", "--help", action=_HelpAction, **options_of_help)
        if has_config_file:
            self.add_argument("--config", metavar="FILE", default=argparse.SUPPRESS, help=_CONFIG_HELP)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        words = sys.argv[1:] if args is None else list(args)
        self.add_other_names()
        if "--config" in self._option_string_actions and self.prefix_chars:
            words = with_config_files(words, self._option_string_actions)
        arguments: list[str] = []
        if self.has_arguments and "--" in words:
            ours = words.index("--")
            words, arguments = words[:ours], words[ours + 1 :]
        parsed, unknown = super().parse_known_args(words, namespace)
        if self.has_arguments:
            parsed.arguments = arguments
        return parsed, unknown

    def add_other_names(self) -> None:
        """Let each flag be typed by other trainers' names, which help does not show."""
        known = self._option_string_actions
        for other, ours in foreign_flags("same").items():
            if f"--{ours}" in known:
                known.setdefault(f"--{other}", known[f"--{ours}"])
        for name, (ours, value) in _SWITCHES.items():
            if (action := known.get(f"--{ours}")) and f"--{name}" not in known:
                options = {"nargs": "?", "const": "true", "choices": ("true", "false"), "type": str.lower}
                known[f"--{name}"] = switch = _Switch([f"--{name}"], action.dest, **options)
                switch.stored = [value] if action.nargs == "+" else value

    def words_of(self, flags: Mapping[str, Any], *, leave_out: Collection[str]) -> list[str]:
        """Return the words of flags that a Python program gives by name, as `parse_args` takes them.

        `leave_out`: flags that the program can't give. Raises ValueError for a name or a value that no flag
        can take.
        """
        self.add_other_names()
        known = self._option_string_actions
        left = {flag: action for flag, action in known.items() if action.dest not in leave_out}
        return words_of(list(flags.items()), left)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            parser = getattr(parsed, "parser", self)  # the verb's
            shown = [flag for action in parser._actions for flag in action.option_strings]
            hint = hint_for(unknown, shown)
            parser.error(f"unknown: {' '.join(unknown)}" + (f"\nhint: {hint}" if hint else ""))
        return parsed

    def error(self, message: str) -> None:
        problem, _, hint = message.partition("\nhint: ")
        raise ValueError(f"{problem}\nhint: {f'{hint}; ' if hint else ''}{self.prog} --help") from None

    def format_help(self, *, every_flag: bool = False) -> str:
        basic = {action for action in self._actions if getattr(action, "basic", False)}
        every_flag = every_flag or not basic
        formatter = self._get_formatter()
        formatter.add_usage(self.usage or self._short_usage(), self._actions, [])
        formatter.add_text(self.description)
        formatter.add_text(_GRID_NOTE if self.has_grid else None)
        for group in self._action_groups:
            formatter.start_section(group.title)
            shown = [a for a in group._group_actions if every_flag or a in basic or not a.option_strings]
            formatter.add_text(group.description if shown else None)
            formatter.add_arguments(shown)
            formatter.end_section()
        if self.examples:
            formatter.add_text(f"examples:\n{self.examples}")
        if every_flag:
            formatter.add_text(self.epilog)
        else:
            formatter.add_text(f"flags from a file: --config FILE.yaml; every flag: {self.prog} --help all")
        return formatter.format_help()

    def _short_usage(self) -> str:
        """`slm recommend --gpu NAME ... [flags]`: positional arguments and required flags alone."""
        formatter = self._get_formatter()
        needed = [
            " ".join([*action.option_strings[:1], formatter._format_args(action, action.dest)])
            for action in self._actions
            if not action.option_strings or action.required
        ]
        return " ".join([self.prog, *needed, "[flags]"]).replace("%", "%%")


_CONFIG_HELP = "YAML with values of these flags, by name without --; a flag of the command line wins"
_GRID_NOTE = "Flags shown with ... take several values; every combination is a row."


class _HelpAction(argparse.Action):
    """`--help`, or `--help all` for every flag."""

    def __call__(self, parser: argparse.ArgumentParser, _: Any, value: Any, flag: Any = None) -> None:
        parser._print_message(parser.format_help(every_flag=value == "all"), sys.stdout)
        parser.exit()


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Shows several values as `N ...`, and a flag's metavar once, after all of its names."""

    def _format_args(self, action: argparse.Action, default_metavar: str) -> str:
        if action.nargs not in ("+", "*"):
            return super()._format_args(action, default_metavar)
        metavar = self._metavar_formatter(action, default_metavar)(1)[0]
        return f"{metavar} ..." if action.nargs == "+" else f"[{metavar} ...]"

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        names = ", ".join(action.option_strings)
        return f"{names} {self._format_args(action, action.dest.upper())}".rstrip()


def with_flags_of(verb: str, parser: Parser) -> Parser:
    """Return the parser with the flags of a verb, whose module is loaded here: no verb loads another."""
    import_module(f"slm_toolkit.cli.{verb}").fill(parser)
    parser.set_defaults(parser=parser)
    return parser


def positive_number(text: str) -> float:
    if not 0 < float(text) < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return float(text)


def count(text: str, *, least: int = 1) -> int:
    if int(text) < least:
        raise argparse.ArgumentTypeError(f"{text} is below {least}")
    return int(text)


def whole_number(text: str) -> int:
    return count(text, least=0)
