"""Each reader of user input accepts any input, or refuses it by a ValueError with a hint."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from conftest import ENV, ROOT

sys.path.insert(0, str(ROOT / "bench"))

import fuzz
from fuzz import CORPUS, READERS, Reader, verdict

from slm_toolkit.base.user_files import MOST_LEVELS, MOST_VALUES, json_of, read_text, yaml_of

hypothesis = pytest.importorskip("hypothesis", reason="pip install -e '.[test]'")
from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

BY_NAME = {reader.name: reader for reader in READERS}
SLOW = ("record", "doctor", "command_line", "dataset_file", "model_name")
"readers that take tens of ms per input, or seconds to import"
FAST = [reader for reader in READERS if reader.name not in SLOW]
FINE = ("accepted", "refused")
SAME = settings(  # in every run the same examples, however slow the machine is
    max_examples=40,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-(10**400), 10**400),
    st.floats(),
    st.text(),
    st.sampled_from(("auto", "none", "cpu", "\x1b[2J", "../../x", "\x00", "[/]", "10" * 200)),
)
VALUES = st.recursive(
    LEAVES, lambda below: st.lists(below, max_size=4) | st.dictionaries(st.text(), below, max_size=4)
)
PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs"))),
    lambda below: (
        st.lists(below, max_size=4) | st.dictionaries(st.text("abc_ é:#'\"", max_size=5), below, max_size=4)
    ),
)


def past_finds() -> list[Path]:
    return sorted(path for path in CORPUS.glob("*/*") if path.is_file())


@pytest.mark.parametrize("path", past_finds(), ids=lambda path: f"{path.parent.name}-{path.name}")
def test_what_once_broke_a_reader_does_not(path: Path, tmp_path: Path) -> None:
    assert verdict(BY_NAME[path.parent.name], path.read_bytes(), tmp_path / "work", seconds=120) in FINE


@pytest.mark.parametrize("reader", FAST, ids=lambda reader: reader.name)
def test_any_bytes_are_read_or_refused(reader: Reader, tmp_path: Path) -> None:
    @SAME
    @given(st.binary(max_size=400) | st.text(max_size=200).map(str.encode))
    def reads(data: bytes) -> None:
        assert verdict(reader, data, tmp_path / "work", seconds=0) in FINE

    reads()


@pytest.mark.parametrize(
    "name",
    ["strategy_yaml", "deepspeed_json", "model_config", "prices", "network", "convert_file"],
)
def test_any_values_are_read_or_refused(name: str, tmp_path: Path) -> None:
    """Any values, alone and in the place of each value of a real file."""
    real = [value for seed in BY_NAME[name].seeds() if isinstance(value := yaml.safe_load(seed), dict)]

    @SAME
    @given(st.sampled_from(real), st.data(), VALUES)
    def reads(whole: dict, data: st.DataObject, value: object) -> None:
        key = data.draw(st.sampled_from(list(whole)))
        below = whole[key]
        if isinstance(below, dict) and below and data.draw(st.booleans()):
            changed = {**whole, key: {**below, data.draw(st.sampled_from(list(below))): value}}
        else:
            changed = data.draw(st.sampled_from(({**whole, key: value}, value)))
        for text in (json.dumps(changed), yaml.safe_dump(changed, sort_keys=False)):
            assert (
                verdict(BY_NAME[name], text.encode("utf-8", "replace"), tmp_path / "work", seconds=0) in FINE
            )

    reads()


@SAME
@given(PLAIN)
def test_plain_values_are_read_as_they_were_written(value: object) -> None:
    assert json_of(json.dumps(value), "x.json", hint="h") == value
    assert yaml_of(yaml.safe_dump(value, allow_unicode=True), "x.yaml", hint="h") == value


@SAME
@given(st.integers(1, 60), st.integers(1, 200))
def test_depth_is_counted_before_anything_is_made(depth: int, copies: int) -> None:
    """A list in a list, so and so deep; and as many copies of one alias."""
    for text, read in (("[" * depth + "]" * depth, json_of), ("- " * depth + "x", yaml_of)):
        if depth <= MOST_LEVELS:
            assert read(text, "x", hint="h") is not None
        else:
            with pytest.raises(ValueError, match=f"settings nested more than {MOST_LEVELS} levels"):
                read(text, "x", hint="h")
    # `a` has copies + 1 values; `b` repeats it as often: with the keys and both mappings' own, 1 + 2 + 2 more
    num_values = 3 + (copies + 1) + 1 + copies * (copies + 1)
    text = f"a: &a [{', '.join('x' * copies)}]\nb: [{', '.join(['*a'] * copies)}]\n"
    if num_values <= MOST_VALUES:
        assert yaml_of(text, "x", hint="h")["b"] == [["x"] * copies] * copies
    else:
        with pytest.raises(ValueError, match=f"more than {MOST_VALUES:,} values"):
            yaml_of(text, "x", hint="h")


@pytest.mark.parametrize("word", ["NaN", "Infinity", "-Infinity", "1e400", "-1e400", "9" * 5000])
def test_a_number_that_is_none_is_refused_in_json_and_yaml(word: str) -> None:
    with pytest.raises(ValueError, match="hint: h"):
        json_of(f'{{"a": [{word}]}}', "x.json", hint="h")
    yaml_word = {"NaN": ".nan", "Infinity": ".inf", "-Infinity": "-.inf"}.get(
        word, word.replace("1e", "1.0e+")
    )
    with pytest.raises(ValueError, match="hint: h"):
        yaml_of(f"a: [{yaml_word}]", "x.yaml", hint="h")
    assert math.isclose(json_of("1e308", "x", hint="h"), 1e308)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ("a: 1".encode("utf-16"), "can't decode byte"),
        (b"a: \x00", "control characters are not allowed"),
        (b"a: \x80", "can't decode byte"),
        (b"[" * 12_000, "exceeded maximum nesting depth"),  # took 18 s
        (b"x" * 200_000, "more than 131,072 bytes"),
        (b"a: 1\nb: !!python/object/apply:os.system [x]", "the tag tag:yaml.org,2002:python"),
        (b"1: a", "the key 1, which is not text"),
        (b"a: 2026-11-01", "the date '2026-11-01'"),
        (b"a: &x [*x]", "settings nested more than"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(data: bytes, says: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_bytes(data)
    with pytest.raises(ValueError, match="hint: ") as refused:
        yaml_of(read_text(path, hint="h"), path, hint="h")
    assert says in str(refused.value)


def test_a_byte_order_mark_is_no_part_of_a_yaml(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_bytes(b"\xef\xbb\xbfa: 1\r\nb: 2\r")
    assert yaml_of(read_text(path, hint="h"), path, hint="h") == {"a": 1, "b": 2}


def test_a_sample_of_the_bench_finds_nothing() -> None:
    skipped = ("dataset_file", "dataset_names", "model_name")
    names = [reader.name for reader in READERS if reader.name not in skipped]
    command = (sys.executable, "bench/fuzz.py", "--inputs", "120", "--seed", "11", "--json", "--draft")
    done = subprocess.run(
        [*command, "--readers", *names], cwd=ROOT, env=ENV, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout)
    assert sum(count["inputs"] for count in counts.values()) == 120
    assert [name for name, count in counts.items() if count["finds"]] == []


def test_the_bench_sees_what_breaks_a_reader(tmp_path: Path) -> None:
    """Each kind of find, of readers made for it."""

    def without_hint(data: bytes, folder: Path) -> None:
        raise ValueError("no hint")

    def broken(data: bytes, folder: Path) -> None:
        {}["x"]

    def endless(data: bytes, folder: Path) -> None:
        while True:
            pass

    def refusing(data: bytes, folder: Path) -> None:
        raise ValueError("what\nhint: how")

    results = {
        read.__name__: verdict(Reader("x", read, list, 1), b"", tmp_path / "work", seconds=0.2)
        for read in (without_hint, broken, endless, refusing)
    }
    kinds = {name: result.split(" ")[0] for name, result in results.items()}
    assert kinds == {
        "without_hint": "ValueError",
        "broken": "KeyError",
        "endless": "TooLongError",
        "refusing": "refused",
    }


def test_the_bench_ends_native_code_and_measures_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No alarm interrupts a hash, and a reader may turn a MemoryError into a refusal."""
    monkeypatch.setattr(fuzz, "WALL_SECONDS", 1.0)
    monkeypatch.setattr(fuzz, "MEMORY_BYTES", 2**24)

    def read(data: bytes, folder: Path) -> None:
        if data == b"hash":
            doubled: tuple = ()
            for _ in range(60):
                doubled = (doubled, doubled)
            hash(doubled)
        elif data == b"memory":
            bytearray(b"x") * 2**25

    reader = Reader("x", read, lambda: [b""], 1, lambda seeds, rng: rng.choice((b"hash", b"memory", b"fine")))
    outcome = fuzz.fuzz(reader, 12, 1, tmp_path / "work", seconds=math.inf)
    assert outcome.num_inputs == 12
    assert set(outcome.num_finds) == {"the process ended with -9", "MemoryError"}
    assert outcome.num_accepted
