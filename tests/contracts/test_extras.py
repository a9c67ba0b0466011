"""Messages name packages that an index has: the toolkit itself is on none."""

import re
import tomllib

from conftest import ROOT, run

_FILES = run("git", "ls-files", "slm_toolkit", "docs", "recipes", "README.md").out.split()
SHOWN = [name for name in _FILES if name.endswith((".py", ".md", ".sh", ".yaml"))]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def package(requirement: str) -> str:
    return re.match(r"[\w-]+", requirement)[0]


def test_no_message_installs_the_toolkit_from_an_index() -> None:
    for name in SHOWN:
        text = (ROOT / name).read_text()
        assert not re.search(r"slm[-_]toolkit\[|pip install [^\n`]*\bslm[-_]toolkit\b", text), name
        assert "SLM_TOOLKIT: slm-toolkit" not in text, name


def test_every_pip_install_of_a_message_is_of_packages_that_pyproject_knows() -> None:
    required = [*PROJECT["dependencies"], *(line for lines in EXTRAS.values() for line in lines)]
    known = set(map(package, required))
    named = {
        word
        for name in SHOWN
        for words in re.findall(r"pip install ((?:[a-z][\w-]* ?)+)", (ROOT / name).read_text())
        for word in words.split()
    }
    assert {"peft", "bitsandbytes"} <= named
    assert named <= known | {"scipy"}  # of a bench's fit
