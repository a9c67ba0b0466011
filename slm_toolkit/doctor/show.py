"""Findings as text: what it is, why, and the change, wrapped to the width there is."""

import textwrap
from collections import Counter

from rich.text import Text

from slm_toolkit.doctor.finding import SEVERITIES, Finding

_STYLE = {"wrong": "bold red", "unwise": "bold yellow", "could be faster": "green"}
_INDENT = "    "


def finding_text(found: list[Finding], *, width: int) -> Text:
    """All findings, those of one cause and one change together, and how many of each severity.

    Lines break between words only, so that a flag or a path can be copied; print it with `soft_wrap=True`.
    """
    text = Text()
    groups: dict[tuple, list[Finding]] = {}
    for finding in found:
        same = (finding.severity, finding.name, finding.why, finding.change, finding.file, finding.key)
        groups.setdefault(same, []).append(finding)
    for (severity, name, why, change, file, key), alike in groups.items():
        for sentence in dict.fromkeys(finding.sentence for finding in alike):
            text.append_text(_wrapped(f"{severity}: {sentence}  [{name}]", width, style=_STYLE[severity]))
        if file is not None:
            text.append(f"{_INDENT}{file}{f': {key}' if key else ''}\n", style="dim")
        text.append_text(_wrapped(f"why: {why}", width, indent=_INDENT))
        text.append_text(_wrapped(f"change: {change}", width, indent=_INDENT, style="bold"))
    text.append(count_line(found), style="bold")
    return text


def count_line(found: list[Finding]) -> str:
    counts = Counter(finding.severity for finding in found)
    line = ", ".join(f"{counts[name]} {name}" for name in SEVERITIES if counts[name])
    num_mended = sum(finding.is_mended_by_files for finding in found)
    return line + (f"; --fix mends {num_mended}" if num_mended else "")


def _wrapped(words: str, width: int, *, indent: str = "", style: str = "") -> Text:
    """A paragraph that hangs by `_INDENT`; `style` is of what stands before its first colon."""
    lines = textwrap.fill(
        words,
        width=max(width, 40),
        initial_indent=indent,
        subsequent_indent=_INDENT + indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    text = Text(f"{lines}\n")
    text.stylize(style, 0, len(indent) + words.index(":"))
    return text
