"""What we lean on and nobody promised to keep is as we use it, in the versions installed here, and is listed.

A new private name of somebody else's needs a row in a table of drift_*.py; drift_engines.py and drift_zero.py
ask theirs of real engines in a process of their own.
"""

import re

import pytest
import torch
from drift import ROOT, Leaning, own_uses, uses_in
from drift_engines import ENGINES, broken_engines
from drift_extras import EXTRAS
from drift_kernels import KERNELS
from drift_launch import LAUNCHES
from drift_models import MODELS
from drift_pretend import PRETEND
from drift_torch import TORCH
from drift_words import WORDS

HERE = (*TORCH, *KERNELS, *MODELS, *EXTRAS, *LAUNCHES, *WORDS, *PRETEND)
ALL = (*HERE, *ENGINES)


def thing(row: Leaning) -> str:
    return row.thing


@pytest.mark.parametrize("row", HERE, ids=thing)
def test_what_we_lean_on_is_still_so(row: Leaning) -> None:
    try:
        row.check()
    except pytest.skip.Exception:
        raise
    except Exception as error:
        pytest.fail(row.broken(f"{type(error).__name__}: {error}"))


@pytest.mark.parametrize("row", ENGINES, ids=thing)
def test_what_we_lean_on_in_engines_is_still_so(row: Leaning) -> None:
    if (found := broken_engines().get(row.thing)) is not None:
        pytest.fail(row.broken(found))


def test_every_private_or_undocumented_use_is_in_the_table() -> None:
    listed = {name for row in ALL for name in row.names}
    new = [f"{use.place}: {use.how}" for use in own_uses() if use.name not in listed]
    hint = "a row in tests/contracts/drift_*.py: what, why, what to change, and a check of what is installed"
    assert not new, "\n".join([*new, f"not promised by anybody; it needs {hint}"])


def test_every_row_is_of_something_that_we_use() -> None:
    sources = [path.read_text() for path in (ROOT / "slm_toolkit").rglob("*.py")]
    words = {word for source in sources for word in re.findall(r"[\w.:]+", source)}
    used = words | {part for word in words for part in word.split(".")} | {use.name for use in own_uses()}
    stale = [row.thing for row in ALL if not used & set(row.names)]
    assert not stale, f"nothing uses it any more, so its row can go: {stale}"
    assert len({row.thing for row in ALL}) == len(ALL)


@pytest.mark.parametrize(
    ("source", "file", "name"),
    [
        ("import torch\ntorch._C._set_it(1)", "slm_toolkit/report/new.py", "_set_it"),
        ("class Mine(Theirs):\n def _start(self):\n  super()._start()", "slm_toolkit/run/new.py", "_start"),
        ("from accelerate.utils._hidden import thing", "slm_toolkit/run/new.py", "thing"),
        ("from deepspeed.utils import _thing", "tests/new.py", "_thing"),
        ("import torch._inner.part", "bench/new.py", "torch._inner.part"),
        ("found = getattr(engine, 'secret_size', 0)", "slm_toolkit/run/new.py", "secret_size"),
        ("with patch.object(torch.nn, 'Linear', Mine): pass", "slm_toolkit/run/new.py", "Linear"),
        ("size = engine.optimizer.bit16_groups_flat[0]", "slm_toolkit/run/new.py", "bit16_groups_flat"),
        ("name = os.environ['TORCHELASTIC_RUN_ID']", "slm_toolkit/run/new.py", "TORCHELASTIC_RUN_ID"),
        (
            "module = sys.modules['transformers.cache_utils']",
            "slm_toolkit/cli/main.py",
            "transformers.cache_utils",
        ),
        ("name = name.replace('_wrapped.', '')", "slm_toolkit/run/new.py", "_wrapped"),
    ],
)
def test_a_new_use_is_seen(source: str, file: str, name: str) -> None:
    (use,) = [use for use in uses_in(source, file) if use.name == name]
    assert use.place.startswith(f"{file}:")


@pytest.mark.parametrize(
    "source",
    [
        "class Mine:\n def _part(self): pass\n def whole(self): self._part()",
        "_TABLE = 1\nprint(_TABLE, self._made)\nself._made = 2",
        "'''torch.secret._thing is only told of'''\nos._exit(0)",
        "shape = model.weight.shape, getattr(args, 'own'), {'own': 1}\nown = 2",
    ],
)
def test_what_is_our_own_or_documented_needs_no_row(source: str) -> None:
    assert uses_in(source, "slm_toolkit/run/new.py") == []


def test_a_row_that_no_longer_holds_says_where_why_and_what_to_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (row,) = [row for row in KERNELS if "_foreach_norm" in row.names]
    monkeypatch.delattr(torch, "_foreach_norm")
    with pytest.raises(AttributeError) as error:
        row.check()
    said = row.broken(str(error.value)).splitlines()
    assert said[0].startswith("torch: operators on lists of tensors: no longer as we use it: ")
    lines = r"\.py:\d+(, \d+)+"
    files = rf"slm_toolkit/run/engine/muon{lines}; slm_toolkit/run/engine/optimizer{lines}"
    assert re.fullmatch(f"used in: {files}", said[1])
    assert said[2:] == [f"why: {row.why}", f"what to change: {row.change}"]
