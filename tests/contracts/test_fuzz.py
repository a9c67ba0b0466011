"""Each reader of user input accepts any input, or refuses it by a ValueError with a hint."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from conftest import bench

from slm_toolkit.base.user_files import MOST_LEVELS, json_of, read_text, yaml_of

hypothesis = pytest.importorskip("hypothesis", reason="pip install -e '.[test]'")
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

fuzz = bench("fuzz")
SAME = settings(fuzz.LIMITS, derandomize=True, max_examples=40)
"in every run the same examples"
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


@pytest.mark.parametrize("name", fuzz.READERS)
def test_a_reader_reads_or_refuses_past_finds_and_new_inputs(name: str) -> None:
    for path in (fuzz.CORPUS / name).rglob("*"):
        if path.is_file():
            fuzz.accepts(name, path.read_bytes())
    fuzz.fuzz(name, settings(SAME, max_examples=20))


@SAME
@given(PLAIN)
def test_plain_values_are_read_as_they_were_written(value: object) -> None:
    assert json_of(json.dumps(value), "x.json", hint="h") == value
    assert yaml_of(yaml.safe_dump(value, allow_unicode=True), "x.yaml", hint="h") == value


@pytest.mark.parametrize(
    ("text", "read"), [("[" * 41 + "1" + "]" * 41, json_of), ("- " * 41 + "x", yaml_of)], ids=["json", "yaml"]
)
def test_depth_is_limited(text: str, read: Callable) -> None:
    assert read(text[1:-1] if read is json_of else text[2:], "x", hint="h") is not None
    with pytest.raises(ValueError, match=f"over {MOST_LEVELS} nested levels"):
        read(text, "x", hint="h")


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
        (b"a: &x [*x]", "alias x inside itself"),
        (b"a: &x [1]\nb: [" + b"*x," * 11 + b"]", "over 10 aliases"),
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
