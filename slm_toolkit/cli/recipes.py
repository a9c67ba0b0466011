"""`slm recipes`: the shell scripts of this package, each of which answers one question."""

import argparse
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from slm_toolkit.base.errors import user_errors
from slm_toolkit.base.safe_files import write_beside

_DESCRIPTION = """\
List, print or copy shell scripts. Each answers one question, with commands and an estimated time and cost.
With a GPU a recipe trains for real, by the variables in its first block, which the environment can change.
Without a GPU, or with TRY=1, it trains two steps of a tiny model."""
_EXAMPLES = """\
  slm recipes                            list all recipes, with hardware, time and cost
  slm recipes lora                       print one
  slm recipes --copy mine                write all of them as files
"""
_EPILOG = """\
more examples:
  TRY=1 bash <(slm recipes lora)         two steps of it, on any computer
  MODEL=slm-500m-hw bash mine/cheapest_100m.sh
"""


@dataclass(frozen=True)
class Recipe:
    """A script, and the facts in its first lines. Memory, time and cost were estimated on `as_of`."""

    name: str
    question: str
    hardware: str
    memory: str
    time: str
    "`6.1 h` or `12 min`; without an estimate a dash, with the reason in parentheses"
    cost: str
    as_of: str
    text: str

    @property
    def estimate(self) -> list[str]:
        """The words of the script's first `slm recommend` or `slm estimate`, which gave the figures."""
        text = self.text.replace("\\\n", " ")
        return shlex.split(re.search(r"^slm (?:recommend|estimate) [^>|#\n]+", text, re.M)[0])


def fill(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `slm recipes`."""
    parser.description, parser.examples, parser.epilog = _DESCRIPTION, _EXAMPLES, _EPILOG
    parser.add_argument("name", nargs="?", help="recipe to print (default: list all)")
    parser.add_argument(
        "--copy", type=Path, metavar="DIR", help="write all recipes, or the named one, into DIR"
    )
    parser.set_defaults(verb=_recipes)


def shipped_recipes() -> list[Recipe]:
    """Return all recipes, sorted by name."""
    return [read_recipe(path) for path in sorted(_folder().glob("*.sh"))]


def read_recipe(path: Path) -> Recipe:
    """Read a recipe. Raises KeyError, TypeError or AttributeError if its first lines lack a fact."""
    text = path.read_text()
    said = dict(re.findall(r"^# (hardware|memory|time|cost): (.+)$", text, re.M))
    as_of = re.search(r"^# estimated on (\d{4}-\d\d-\d\d) by the first command below$", text, re.M)[1]
    question = re.match(r"#!/usr/bin/env bash\n# (.+\?)\n", text)[1]
    return Recipe(path.stem, question, **said, as_of=as_of, text=text)


def _folder() -> Path:
    """Return the folder of the recipes: in the wheel, else in the checkout."""
    package = Path(__file__).parents[1]
    return package / "recipes_sh" if (package / "recipes_sh").is_dir() else package.parent / "recipes"


def _recipes(args: argparse.Namespace) -> int:
    with user_errors():
        chosen = _named(args.name)
        if args.copy is not None:
            texts = {args.copy / f"{recipe.name}.sh": recipe.text for recipe in chosen}
            for path in write_beside(texts, flag="--copy"):
                path.chmod(0o755)
            print(*texts, sep="\n")
            return 0
    if args.name is not None:
        print(chosen[0].text, end="")
    else:
        _print_list(chosen)
    return 0


def _named(name: str | None) -> list[Recipe]:
    recipes = shipped_recipes()
    chosen = [recipe for recipe in recipes if name is None or recipe.name == name]
    if not chosen:
        names = ", ".join(recipe.name for recipe in recipes)
        raise ValueError(f"unknown recipe {name!r}\nhint: there are {names}")
    return chosen


def _print_list(recipes: list[Recipe]) -> None:
    from rich.table import Table

    from slm_toolkit.report.tables.fitted import console_of_stdout

    console = console_of_stdout()
    table = Table(header_style="bold")
    table.add_column("recipe", no_wrap=True)
    table.add_column("question")
    for name in ("hardware", "time", "cost"):
        table.add_column(name, justify="right" if name != "hardware" else "left")
    for recipe in recipes:
        short = [value.partition(" (")[0] for value in (recipe.time, recipe.cost)]
        table.add_row(recipe.name, recipe.question, recipe.hardware, *short)
    console.print(table)
    dates = sorted({recipe.as_of for recipe in recipes})
    console.print(f"time and cost as estimated on {' to '.join(dict.fromkeys((dates[0], dates[-1])))}")
    console.print("print one: slm recipes NAME; run it: bash <(slm recipes NAME)", markup=False)
