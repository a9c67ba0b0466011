"""Inputs that nobody should type: real files mutated as text and as values, and some that are only nasty."""

import json
import random
import re
from typing import Any

import yaml

LEAVES: tuple[Any, ...] = (
    *(None, True, False, 0, -0.0, -1, 1, 2, 3, 7, 0.5, 1.5, 2**31, 2**63, 10**30, 10**400, -(10**400)),
    *(1e308, -1e308, 1e-308, 5e-324, float("nan"), float("inf"), float("-inf"), 1e18, 10**15),
    *("", " ", "auto", "none", "None", "true", "no", "cpu", "nvme", "x" * 400, "0", "-1", "1e999", "NaN"),
    *("\u0000", "\x1b[31m", "[red]", "[/]", "../../x", "/", "~nobody/x", "a\nb", "<script>", "${x}", "%s"),
    *("\u202e", "é" * 50, "\ud800", "=cmd|' /C calc'!A0", "2026-99-99", "0x_", "{", "}", "&", "*"),
    *([], {}, [[]], [{}], {"": {}}, {"a": {"b": {"c": 1}}}, [None], ["a", 1, None], [0] * 50),
)
"what stands in the place of a value"
_PIECES: tuple[bytes, ...] = (
    *(b"\x00", b"\xff\xfe", b"\xef\xbb\xbf", b"\xc2\x9b", b"\xed\xa0\x80", b"\x1b[2J", b"\r", b"\n", b"\t"),
    *(
        b"{",
        b"}",
        b"[",
        b"]",
        b":",
        b",",
        b'"',
        b"'",
        b"-",
        b"#",
        b"&a ",
        b"*a",
        b"<<: *a\n",
        b"!!int ",
        b"? ",
    ),
    *(b"NaN", b"Infinity", b"-0", b"1e400", b"9" * 5000, b"0x" + b"f" * 5000, b"null", b"true", b"~", b"\\u"),
    *(
        b"- " * 300,
        b"[" * 3000,
        b'{"a":' * 1500,
        b"2026-13-01",
        b"1:60:60",
        b"---\n",
        b"%YAML 9.9\n",
        b"|\n",
        b">",
    ),
)
_NASTY: tuple[bytes, ...] = (
    *(
        b"",
        b"\x00" * 100,
        b"\xff\xfe{\x00}\x00",
        "{}".encode("utf-16"),
        b"\xef\xbb\xbf{}",
        b"\x80\x81",
        b"null",
    ),
    *(b"[" * 100_000, b"- " * 60_000, b'{"a":' * 20_000, b"1" * 100_000, b'"' + b"a" * 200_000, b"~", b"[]"),
    b"a: &a [x, x, x, x, x, x, x, x, x]\n"
    + b"".join(b"%c: &%c [%s]\n" % (c, c, b", ".join([b"*%c" % (c - 1)] * 9)) for c in range(98, 118)),
    b"a: &a {x: 1}\n"
    + b"".join(b"%c: &%c {<<: [%s]}\n" % (c, c, b", ".join([b"*%c" % (c - 1)] * 9)) for c in range(98, 118)),
    *(b"a: &a [*a]\n", b"&a {distributed_type: *a}\n", b"!!python/object/apply:os.system [touch x]\n"),
    *(b"distributed_type: !!python/name:os.system\n", b"? [1, 2]\n: 3\n", b"on: 1\nyes: 2\n1: 3\n"),
)


def made(seeds: list[bytes], rng: random.Random) -> bytes:
    """One input, the same for the same state of `rng`: half of them changed as values, the rest as text."""
    chance = rng.random()
    if chance < 0.02:
        return rng.choice(_NASTY)
    seed = rng.choice(seeds)
    if chance < 0.6 and (value := _value_of(seed)) is not None:
        for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
            value = changed(value, rng)
        return written(value, rng)
    for _ in range(rng.choice((1, 1, 2, 4, 16))):
        seed = _edited(seed, seeds, rng)
    return seed


def written(value: Any, rng: random.Random) -> bytes:
    """As JSON, or as YAML where JSON's own words stop it; half a character stays what it is."""
    if rng.random() < 0.5:
        return json.dumps(value, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")
    try:
        return yaml.safe_dump(value, allow_unicode=rng.random() < 0.5, sort_keys=False).encode()
    except (yaml.YAMLError, ValueError, RecursionError):
        return json.dumps(value).encode()


def changed(value: Any, rng: random.Random) -> Any:
    """A copy with one place of it replaced, removed, renamed, doubled or wrapped."""
    paths = list(_paths(value))
    path = rng.choice(paths)
    return _at(value, path, rng)


def _paths(value: Any, before: tuple = ()) -> Any:
    yield before
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, below in list(pairs)[:60]:
        yield from _paths(below, (*before, key))


def _at(value: Any, path: tuple, rng: random.Random) -> Any:
    if not path:
        return _replaced(value, rng)
    copy = dict(value) if isinstance(value, dict) else list(value)
    key = path[0]
    chance = rng.random() if len(path) == 1 else 1.0
    if chance < 0.1 and isinstance(copy, dict):
        del copy[key]
    elif chance < 0.2 and isinstance(copy, dict):
        copy[rng.choice((key + "_", key.upper(), "", "\x1b", "a.b", "fsdp_" + key))] = copy.pop(key)
    elif chance < 0.25 and isinstance(copy, list):
        copy.insert(key, copy[key])
    elif chance < 0.3 and isinstance(copy, list):
        del copy[key]
    else:
        copy[key] = _at(copy[key], path[1:], rng)
    return copy


def _replaced(value: Any, rng: random.Random) -> Any:
    if rng.random() < 0.15 and isinstance(value, int | float) and abs(value) < 1e300:
        return rng.choice((-value, value + 1, value * 1000, value // 3, float(value), str(value), [value]))
    if rng.random() < 0.05:
        for _ in range(rng.choice((5, 50, 150))):
            value = [value] if rng.random() < 0.5 else {"a": value}
        return value
    return rng.choice(LEAVES)


def _value_of(seed: bytes) -> Any:
    try:
        return json.loads(seed)
    except ValueError:
        pass
    try:
        value = yaml.safe_load(seed)
    except yaml.YAMLError:
        return None
    return value if isinstance(value, dict | list) else None


def _edited(seed: bytes, seeds: list[bytes], rng: random.Random) -> bytes:
    start = rng.randrange(len(seed) + 1)
    end = min(len(seed), start + rng.choice((0, 1, 1, 2, 8, 40, 400)))
    kind = rng.randrange(6)
    if kind == 0:
        return seed[:start] + seed[end:]
    if kind == 1:
        return seed[:start] + rng.choice(_PIECES) + seed[end:]
    if kind == 2:
        return seed[:start] + bytes([rng.randrange(256)]) + seed[end:]
    if kind == 3:
        return seed[:end] + seed[start:]
    if kind == 4:
        return seed[:start]
    other = rng.choice(seeds)
    return seed[:start] + other[rng.randrange(len(other) + 1) :]


def made_checkpoint(seeds: list[bytes], rng: random.Random) -> bytes:
    """A checkpoint with changed tensors, in half of the cases with a manifest that agrees; or any values."""
    if rng.random() < 0.4:
        return made(seeds, rng)
    whole = json.loads(rng.choice(seeds))
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        file = rng.choice(whole["manifest"]["files"])
        if not (tensors := whole["tensors"].get(file["name"])):
            continue
        name, agrees = rng.choice(list(tensors)), rng.random() < 0.5
        tensor, kind = tensors[name], rng.randrange(6)
        size = file["sizes"].get(name, 0) + rng.choice((-8, -1, 1, 5000))
        if kind == 0:
            del tensors[name]
        elif kind == 1:
            tensor["shape"] = rng.choice(([1, *tensor["shape"]], [*tensor["shape"], 1], [2, 8], [], [0]))
        elif kind == 2:
            tensor["dtype"] = rng.choice(("F64", "F16", "BF16", "I64", "U8", "BOOL", "C64", "F8_E4M3", "F4"))
        elif kind == 3:
            tensor["byte"] = rng.choice((0, 127, 255))
        elif kind == 4:
            tensor["shape"] = [max(0, size)]
        else:
            tensors[rng.choice(list(tensors)) + rng.choice(("", "_"))] = tensors.pop(name)
        if agrees and kind == 0:
            del file["sizes"][name], file["starts"][name]
        elif agrees:
            key, by = rng.choice(("starts", "sizes")), rng.choice((-8, -1, 1, 8, 2**40))
            file[key][name] = max(0, size) if kind == 4 else file[key].get(name, 0) + by
    if rng.random() < 0.1:
        whole["manifest"]["files"].append(rng.choice(whole["manifest"]["files"]))
    return json.dumps(whole).encode()


def made_words(seeds: list[bytes], rng: random.Random) -> bytes:
    """A command's words, one a line: of a real one, some replaced, left out, doubled, with odd values."""
    words = rng.choice(seeds).decode().split("\n")
    for _ in range(rng.choice((1, 1, 2, 3))):
        at = rng.randrange(len(words) + 1)
        kind = rng.randrange(5)
        if kind == 0 and words:
            words = words[: max(0, at - 1)] + words[at:]
        elif kind == 1 and at < len(words):
            words.insert(at, words[at])
        elif kind == 2:
            words = words[:at] + rng.choice(seeds).decode().split("\n")[-3:] + words[at:]
        elif at < len(words):
            leaf = rng.choice(LEAVES)
            text = leaf if isinstance(leaf, str) else json.dumps(leaf) if rng.random() < 0.5 else odd(leaf)
            words[at] = words[at].partition("=")[0] + "=" + text if "=" in words[at] else text
    return "\n".join(words).encode("utf-8", "surrogatepass")


_REPORT_OPTIONS = (
    *("--json", "--phases", "--memory", "--errors", "--plot", "--strict", "--schema", "--csv -"),
    *("--markdown -", "--latex -", "--parquet r.parquet", "--csv r.csv", "--baseline runs/0", "--gpu l4"),
    *("--parity_tolerance 0.1", "--usd_per_gpu_hour 2.5", "--inter_node_gbps 100"),
)
_SLOW_REPORT_OPTIONS = ("--html r.html", "--paper")


def made_record_set(seeds: list[bytes], rng: random.Random) -> bytes:
    """One to five records, most of them changed, and options of `slm report`."""
    records = []
    for seed in rng.choices(seeds, k=rng.randrange(1, 6)):
        record = json.loads(seed)
        for _ in range(rng.choice((0, 1, 1, 2, 4))):
            record = changed(record, rng)
        records.append(record)
    options = rng.sample(_REPORT_OPTIONS, rng.randrange(4))
    if rng.random() < 0.03:
        options.append(rng.choice(_SLOW_REPORT_OPTIONS))
    words = " ".join(options).split()
    if words and rng.random() < 0.2:
        words[rng.randrange(len(words))] = odd(rng.choice(LEAVES))
    return json.dumps({"records": records, "options": words}).encode()


PLACES = (
    *("gone", "gone/deeper", "file", "file/deeper", "folder", "locked", "locked/file", "locked/gone", "loop"),
    *("loop/x", "dangling", "n" * 300, "folder/" + "n" * 300, "/" + "d/" * 2500, "/dev/full", "/dev/null"),
    *("", ".", "..", "/proc/self/mem", "/root/x", "[x]", "[x]/*", "*", "~nobody/x", "a\nb", "\x1b[2J"),
)
"what stands for a path: `places_input` makes some of them"


def made_places(seeds: list[bytes], rng: random.Random) -> bytes:
    """First whether the working folder can be looked into, then a command's words with such places."""
    words = [rng.choice(PLACES) if word == "PLACE" else word for word in made_command(seeds, rng)]
    return "\n".join([rng.choice(("open", "open", "unreadable")), *words]).encode("utf-8", "surrogatepass")


def made_command(seeds: list[bytes], rng: random.Random) -> list[str]:
    """The words of a seed; of one in four, one is left out or doubled."""
    words = rng.choice(seeds).decode().split("\n")
    if rng.random() < 0.25:
        at = rng.randrange(1, len(words))
        words[at : at + 1] = [words[at]] * rng.choice((0, 2))
    return words


_ATOMS = (
    *(
        "0",
        "1",
        "-1",
        "1.5",
        "10**9",
        "10**10",
        "99999",
        "'x'",
        "''",
        "'%s%s'",
        "none",
        "true",
        "messages",
        "m",
    ),
    *(
        "messages[0]",
        "messages[0].content",
        "m.content",
        "range(9999)",
        "[1, 2]",
        "{'a': 1}",
        "ns",
        "eos_token",
    ),
    *(
        "namespace(x='')",
        "cycler",
        "lipsum",
        "dict",
        "raise_exception",
        "strftime_now",
        "loop",
        "self",
        "().n",
    ),
)
_OPERATORS = ("+", "-", "*", "/", "//", "%", "**", "~", "==", "<", "in", "and", "or", "is not")
_FILTERS = (
    *(
        "list",
        "length",
        "sort",
        "join",
        "upper",
        "trim",
        "tojson",
        "int",
        "first",
        "last",
        "reverse",
        "string",
    ),
    *(
        "center(10**10)",
        "center(99)",
        "indent(9)",
        "batch(2)",
        "groupby('role')",
        "map('upper')",
        "sum",
        "abs",
    ),
    *(
        "replace('', 'xy')",
        "wordwrap(1)",
        "pprint",
        "items",
        "default('d')",
        "urlize",
        "format(1, 2)",
        "random",
    ),
)


def made_template(seeds: list[bytes], rng: random.Random) -> bytes:
    """A chat template: of a real one, with other statements between its own, or other expressions in them."""
    if rng.random() < 0.1:
        return made(seeds, rng)
    parts = re.split(r"(\{[{%].*?[%}]\})", rng.choice(seeds).decode())
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(len(parts))
        if parts[at].startswith("{{") and rng.random() < 0.5:
            parts[at] = "{{ " + _expression(rng, 3) + " }}"
        else:
            parts.insert(at, _statement(rng, 3))
    return "".join(parts).encode()


def _statement(rng: random.Random, levels: int) -> str:
    value = _expression(rng, levels)
    inside = _statement(rng, levels - 1) if levels else "x"
    forms = (
        *(f"{{{{ {value} }}}}", f"{{{{ {value} }}}}", f"{{% set ns = {value} %}}"),
        f"{{% for m in {value} %}}{inside}{{% endfor %}}",
        f"{{% if {value} %}}{inside}{{% endif %}}",
        f"{{% set s %}}{inside}{{% endset %}}{{{{ s ~ s }}}}",
        f"{{% macro f(m) %}}{inside}{{{{ f({value}) }}}}{{% endmacro %}}{{{{ f(1) }}}}",
    )
    return rng.choice(forms)


def _expression(rng: random.Random, levels: int) -> str:
    if levels == 0 or rng.random() < 0.3:
        return rng.choice(_ATOMS)
    left, right = _expression(rng, levels - 1), _expression(rng, levels - 1)
    forms = (f"({left} {rng.choice(_OPERATORS)} {right})",) * 3 + (f"({left})[{right}]", f"({left})({right})")
    return rng.choice((*forms, f"({left})|{rng.choice(_FILTERS)}", f"({left})|{rng.choice(_FILTERS)}"))


def made_tokenizer(seeds: list[bytes], rng: random.Random) -> bytes:
    """A tokenizer.json: parts of several, ids and texts replaced by others; or changed as any value."""
    value = json.loads(rng.choice(seeds))
    for _ in range(rng.choice((1, 1, 2, 4))):
        chance = rng.random()
        paths = [path for path in _paths(value) if path]
        if chance < 0.25:
            part = rng.choice(("normalizer", "pre_tokenizer", "model", "added_tokens"))
            value[part] = json.loads(rng.choice(seeds))[part]
        elif chance < 0.85:
            path = rng.choice(paths)
            holder = value
            for key in path[:-1]:
                holder = holder[key]
            old = holder[path[-1]]
            if isinstance(old, bool):
                holder[path[-1]] = not old
            elif isinstance(old, int | float):
                holder[path[-1]] = rng.choice((0, 1, 5, 383, 384, 10**6, 2**31, 2**32 - 1, -1.0, 1e300))
            elif isinstance(old, str):
                holder[path[-1]] = rng.choice(
                    ("", "q", "the", "kw" * 30, "\u00e9", "(q+)+$", ".*", "\\b", "[UNK]")
                )
        else:
            value = changed(value, rng)
        if not isinstance(value, dict):
            break
    return json.dumps(value).encode("utf-8", "surrogatepass")


def odd(leaf: Any) -> str:
    """What a number looks like as a flag: 10**400 in full."""
    return f"{leaf:d}" if isinstance(leaf, int) and not isinstance(leaf, bool) else str(leaf)
