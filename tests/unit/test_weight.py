"""The package's weight in tokens, which only falls: an addition pays with a deletion (CONTRIBUTING.md)."""

import ast
import io
import sys
import tokenize
import tomllib

import pytest
from conftest import ROOT

_NOT_COUNTED = (
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    tokenize.ENDMARKER,
)


def weight(source: str) -> int:
    """Count tokens without comments and docstrings; a string is one per ten characters, at least one."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = {
        (node.body[0].lineno, node.body[0].col_offset)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None
    }
    return sum(
        max(1, len(token.string) // 10) if token.type == tokenize.STRING else 1
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type not in _NOT_COUNTED and token.start not in docstrings
    )


def test_weight_counts_neither_comments_nor_docstrings() -> None:
    # def f ( ) : return "0123456789 0123456789": six tokens, and 23 characters in quotes
    assert (
        weight('"""Doc."""\n\n\ndef f():  # why\n    """Doc."""\n    return "0123456789 0123456789"\n')
        == 6 + 2
    )


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="later versions cut f-strings into tokens")
def test_the_package_is_no_heavier_than_the_last_limit() -> None:
    weights = {
        str(path.relative_to(ROOT)): weight(path.read_text()) for path in (ROOT / "slm_toolkit").rglob("*.py")
    }
    limit = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["weight"]["package_tokens"]
    heaviest = sorted(weights, key=weights.get, reverse=True)[:5]
    assert sum(weights.values()) <= limit, f"delete something; the heaviest files: {', '.join(heaviest)}"
