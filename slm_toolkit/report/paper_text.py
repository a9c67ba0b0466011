"""The answers to the paper's four questions as short paragraphs."""

from collections.abc import Callable, Iterable
from itertools import groupby

from slm_toolkit.report.paper_answers import (
    FSDP,
    QUESTIONS,
    AlignedPanel,
    Answers,
    Disagreement,
    Panel,
    Question,
    places,
)

SERIES_WORDS = {
    "sdpa": "FlashAttention",
    "eager": "vanilla",
    "a100-40gb": "A100-40GB",
    "a100-80gb": "A100-80GB",
    "h100-80gb": "H100-80GB",
    "ddp": "DDP",
    "fsdp_full_shard": "FSDP full",
    "fsdp_shard_grad_op": "FSDP grad-op",
}
"in the paper's legends, about"
_RATIO_WORDS = {
    "q1": "FlashAttention over vanilla",
    "q2": "H100 over the better A100",
    "q3": "the better FSDP over DDP",
    "q4": "the better FSDP over DDP",
}


def paragraphs(found: Answers) -> list[tuple[str, str]]:
    """Heading and text of each."""
    return [
        *(
            (f"{question.key.upper()} {question.words}", _answer(question, found.questions[question.key]))
            for question in QUESTIONS
        ),
        ("Where the paper's sentences and its figures disagree", _disagreements(found.disagreements)),
        ("What widths aligned to tensor cores would change (predicted)", _alignment(found.aligned)),
    ]


def _answer(question: Question, panels: tuple[Panel, ...]) -> str:
    return "\n".join(
        (
            f"Best: {_both(panels, _bests, question)}.",
            f"Tokens per dollar of {_RATIO_WORDS[question.key]}: {_ratios(panels)}.",
            f"Out of memory: {_both(panels, _out_of_memory, question)}.",
            _agreement(panels, question),
        )
    )


def _both(
    panels: tuple[Panel, ...],
    words_of: Callable[[tuple[Panel, ...], str, str], str],
    question: Question,
) -> str:
    published = words_of(panels, "published", question.x_words)
    ours = words_of(panels, "our", question.x_words)
    return f"{published} (ours the same)" if ours == published else f"{published} (ours: {ours})"


def _bests(panels: tuple[Panel, ...], whose: str, x_words: str) -> str:
    def best(panel: Panel) -> str:
        return panel.published_best if whose == "published" else _either(panel.our_best)

    if len(everywhere := {best(panel) for panel in panels}) == 1:
        return f"{_word(everywhere.pop())} everywhere"
    places_of_models = [
        f"{model} {_spans((panel.x, best(panel)) for panel in of_model)}"
        for model, of_model in groupby(panels, key=lambda panel: panel.model)
    ]
    return f"{'; '.join(places_of_models)} {x_words}"


def _spans(bests: Iterable[tuple[int, str]]) -> str:
    """`DDP at 1, FSDP full at 2 to 8` of each x and who is best there."""
    found = []
    for name, run in groupby(bests, key=lambda pair: pair[1]):
        xs = [x for x, _ in run]
        found.append(f"{_word(name)} at {xs[0]}" + (f" to {xs[-1]}" if len(xs) > 1 else ""))
    return ", ".join(found)


def _either(series: tuple[str, ...]) -> str:
    return "either FSDP" if series == FSDP else " or ".join(map(_word, series))


def _word(series: str) -> str:
    return SERIES_WORDS.get(series, series)


def _out_of_memory(panels: tuple[Panel, ...], whose: str, x_words: str) -> str:
    found: dict[str, list[tuple[str, int]]] = {}
    for panel in panels:
        for series in getattr(panel, f"{whose}_out_of_memory"):
            found.setdefault(_word(series), []).append((panel.model, panel.x))
    return "; ".join(f"{word} for {places(where, x_words)}" for word, where in found.items()) or "none"


def _ratios(panels: tuple[Panel, ...]) -> str:
    """The range over x, by model, without unexplained points; and how often it is above 1."""
    counted = [p for p in panels if not p.is_unexplained and p.published_ratio and p.our_ratio]
    of_models = [
        f"{model} {_range([panel.published_ratio for panel in of_model])} times "
        f"(ours {_range([panel.our_ratio for panel in of_model])})"
        for model, of_model in ((m, list(group)) for m, group in groupby(counted, key=lambda p: p.model))
    ]
    published, ours = (
        sum(ratio > 1 for ratio in ratios)
        for ratios in ((p.published_ratio for p in counted), (p.our_ratio for p in counted))
    )
    return f"{', '.join(of_models)}; above 1 in {published} of {len(counted)} panels (ours {ours})"


def _range(values: list[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f}"


def _agreement(panels: tuple[Panel, ...], question: Question) -> str:
    counted = [panel for panel in panels if not panel.is_unexplained]
    apart = [panel for panel in counted if panel.is_separated]
    wrong = [panel for panel in apart if panel.published_best not in panel.our_best]
    same = sum(panel.published_best in panel.our_best for panel in counted)
    left_out = " (unexplained ones left out)" if len(counted) < len(panels) else ""
    said = (
        f"The paper and we have the same best in {same} of {len(counted)} panels{left_out}, and in "
        f"{len(apart) - len(wrong)} of the {len(apart)} where its error bars are apart"
    )
    where = places(((panel.model, panel.x) for panel in wrong), question.x_words)
    return f"{said}: not for {where}." if wrong else f"{said}."


def _disagreements(found: tuple[Disagreement, ...]) -> str:
    return "\n".join(
        f"({number}) Text: {one.sentence}. Figures: {one.figures_say}." for number, one in enumerate(found, 1)
    )


def _alignment(panels: tuple[AlignedPanel, ...]) -> str:
    ratios, bests, todays = [], [], []
    for model, group in groupby(panels, key=lambda panel: panel.model):
        of_model = list(group)
        as_is, aligned, today = (
            _range([getattr(panel, name) for panel in of_model])
            for name in ("h100_ratio", "aligned_h100_ratio", "today_h100_ratio")
        )
        change = of_model[0].change
        ratios.append(
            f"{model} with {change} {as_is} -> {aligned}" if change else f"{model}, aligned, {aligned}"
        )
        bests.append(f"{model} {_spans((panel.num_gpus, panel.aligned_best) for panel in of_model)}")
        todays.append(f"{model} {today}")
    before, after, now = (
        sum(getattr(panel, name) == "h100-80gb" for panel in panels)
        for name in ("best", "aligned_best", "today_best")
    )
    return "\n".join(
        (
            f"Tokens per dollar of {_RATIO_WORDS['q2']}, in times: {'; '.join(ratios)}.",
            f"The cheapest would be: {'; '.join(bests)} GPUs: H100 in {after} of {len(panels)} panels, "
            f"{before} with the paper's widths.",
            f"With today's software in steady state, at the paper's prices: {'; '.join(todays)} times: H100 "
            f"is the cheapest in {now} of {len(panels)} panels. A slow first step, and costs per layer that "
            "don't shrink with the GPU, as in the paper's runs, weigh most on the fastest.",
        )
    )
