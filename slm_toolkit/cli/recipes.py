"""`slm recipes`: the shell scripts of this package, each of which answers one question."""

import argparse
import re
from pathlib import Path
from types import SimpleNamespace

from slm_toolkit.base.errors import user_errors

_DESCRIPTION = """\
List or print shell scripts. Each answers one question, with commands and an estimated time and cost.
With a GPU a recipe trains for real, by the variables in its first block, which the environment can change.
Without a GPU, or with TRY=1, it trains two steps of a tiny model."""
_EXAMPLES = """\
  slm recipes                            list all recipes, with hardware, time and cost
  slm recipes lora                       print one
  slm recipes lora > lora.sh             write it as a file
"""
_HEAD = re.compile(
    r"""#!/usr/bin/env bash
# (?P<question>.+\?)
# hardware: (?P<hardware>.+)
# memory: .+
# time: (?P<time>.+)
# cost: (?P<cost>.+)
# estimated on (?P<as_of>\d{4}-\d\d-\d\d) by the first command below
"""
)


def fill(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `slm recipes`."""
    parser.description, parser.examples = _DESCRIPTION, _EXAMPLES
    parser.add_argument("name", nargs="?", help="recipe to print (default: list all)")
    parser.set_defaults(verb=_recipes)


def shipped_recipes() -> list[SimpleNamespace]:
    """Return all recipes, sorted by name."""
    return [read_recipe(path) for path in sorted(_folder().glob("*.sh"))]


def read_recipe(path: Path) -> SimpleNamespace:
    """Return a recipe's name, text, and the facts in its first lines: question, hardware, time, cost, as_of.

    Time and cost were estimated on `as_of`: `6.1 h` or `12 min`; a dash without an estimate.
    Raises AttributeError if a fact is missing.
    """
    text = path.read_text()
    return SimpleNamespace(name=path.stem, text=text, **_HEAD.match(text).groupdict())


def _folder() -> Path:
    """Return the folder of the recipes: in the wheel, else in the checkout."""
    package = Path(__file__).parents[1]
    return package / "recipes_sh" if (package / "recipes_sh").is_dir() else package.parent / "recipes"


def _recipes(args: argparse.Namespace) -> int:
    recipes = shipped_recipes()
    if args.name is None:
        for recipe in recipes:
            print(f"{recipe.name:18}{recipe.question}")
            print(f"{'':18}{recipe.hardware}; {recipe.time}; {recipe.cost}")
        return 0
    texts = {recipe.name: recipe.text for recipe in recipes}
    with user_errors():
        if args.name not in texts:
            raise ValueError(f"unknown recipe {args.name!r}\nhint: there are {', '.join(texts)}")
    print(texts[args.name], end="")
    return 0
