"""Answer the paper's four questions in short paragraphs, with the numbers of its figures and ours."""

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import groupby

from comparison import (
    PAPER,
    Comparison,
    Point,
    cell_token_per_dollar,
    cells_of,
    paper_model,
    points,
)

from slm_toolkit.model.model_spec import ALIGNED_TO, ModelSpec
from slm_toolkit.predict.bottleneck import WORTH_SAYING
from slm_toolkit.predict.speed.matmul import ALIGNMENT, is_aligned
from slm_toolkit.predict.speed.software import TODAY, Software

FSDP = ("fsdp_full_shard", "fsdp_shard_grad_op")


@dataclass(frozen=True)
class Question:
    """A question of the paper, and the figure that answers it."""

    key: str
    words: str
    figure: int
    x_words: str
    challengers: tuple[str, ...]
    "the series in question; ratios are the best of these over the best of the others"


QUESTIONS = (
    Question("q1", "How much does FlashAttention give over vanilla attention?", 1, "sequences", ("sdpa",)),
    Question("q2", "Which GPU type gives most tokens per dollar?", 2, "GPUs", ("h100-80gb",)),
    Question("q3", "Which communication scheme, by number of nodes?", 3, "nodes", FSDP),
    Question("q4", "Which communication scheme, by global batch?", 4, "sequences", FSDP),
)


@dataclass(frozen=True)
class FigurePanel:
    """The series with the most tokens per dollar, published and ours, for one model and one x of a figure."""

    model: str
    x: int
    published_best: str
    our_best: tuple[str, ...]
    "the best series and all within 1 % of it: predictions are not more precise"
    published_ratio: float | None
    "the question's challengers over the others; None if one of the two is out of memory"
    our_ratio: float | None
    published_out_of_memory: tuple[str, ...]
    our_out_of_memory: tuple[str, ...]
    is_separated: bool
    "True if the error bars of the published best and second best don't overlap"
    is_unexplained: bool
    "True if it contains a point that the paper's other points contradict"


@dataclass(frozen=True)
class AlignedPanel:
    """The predicted cheapest GPU type for one model and number of GPUs, with original and aligned widths."""

    model: str
    change: str
    "the changed widths of the aligned model; empty if the model is aligned already"
    num_gpus: int
    best: str
    aligned_best: str
    h100_ratio: float
    "tokens per dollar of the H100 over those of the better A100"
    aligned_h100_ratio: float
    today_best: str
    "for the aligned model with today's software in steady state, without a slow first step in the mean"
    today_h100_ratio: float


@dataclass(frozen=True)
class Disagreement:
    """A sentence of the paper, in our words, and the values in its figures that contradict it."""

    sentence: str
    figures_say: str


@dataclass(frozen=True)
class Answers:
    """The answers that `compare.py` prints with the figures."""

    questions: dict[str, tuple[FigurePanel, ...]]
    "keyed by the question's key"
    disagreements: tuple[Disagreement, ...]
    aligned: tuple[AlignedPanel, ...]


def answers(compared: list[Comparison]) -> Answers:
    return Answers(
        questions={question.key: _panels(compared, question) for question in QUESTIONS},
        disagreements=disagreements(),
        aligned=_aligned_panels(),
    )


def disagreements() -> tuple[Disagreement, ...]:
    """Return the contradictions between the paper's text and its figures, with values from the figures."""
    published = {(p.figure, p.model, p.series, p.x): p.token_per_dollar for p in points()}

    def pair(figure: int, model: str, first: str, second: str, x: int) -> str:
        values = (thousands(published[figure, model, series, x]) for series in (first, second))
        return f"{model} {' against '.join(values)}"

    full_shard, grad_op = FSDP
    of_figure_3 = dict.fromkeys((p.model, p.x) for p in points() if p.figure == 3)
    fsdp_ahead = [
        (model, x)
        for model, x in of_figure_3
        if max(published[3, model, series, x] for series in FSDP) > published[3, model, "ddp", x]
    ]
    full_ahead = [
        (model, x)
        for model, x in of_figure_3
        if published[3, model, full_shard, x] > published[3, model, grad_op, x]
    ]
    return (
        Disagreement(
            "A100-80GB is the better choice for 1B and 2B with up to 32 GPUs",
            f"A100-40GB is better there, {pair(2, 'slm-1b', 'a100-40gb', 'a100-80gb', 32)}, "
            f"{pair(2, 'slm-2b', 'a100-40gb', 'a100-80gb', 32)} (figure 2)",
        ),
        Disagreement(
            "H100 is not cost-efficient for small models",
            f"on one GPU it beats A100-80GB, {pair(2, 'slm-1b', 'h100-80gb', 'a100-80gb', 1)} (figure 2)",
        ),
        Disagreement(
            "DDP is the best scheme (title of figure 3)",
            f"FSDP is better for {places(fsdp_ahead, 'nodes')}",
        ),
        Disagreement(
            "FSDP grad-op is better than full shard",
            f"full shard is better for {places(full_ahead, 'nodes')} (figure 3)",
        ),
        Disagreement(
            "FlashAttention lets 1B and 2B train at a global batch of 1024 (question 1), of 512 (conclusion)",
            f"both have a point at 1024 (figure 1), and vanilla has a point at 512: "
            f"{pair(1, 'slm-1b', 'sdpa', 'eager', 512)}, {pair(1, 'slm-2b', 'sdpa', 'eager', 512)}",
        ),
    )


def thousands(value: float) -> str:
    """Return 62116 as 62.1k, and 0 as OOM."""
    return f"{value / 1e3:.1f}k" if value else "OOM"


def places(pairs: Iterable[tuple[str, int]], x_words: str) -> str:
    """Return `slm-1b at 1, slm-2b at 1, 2, 4 nodes` for pairs of a model and an x."""
    by_model: dict[str, list[int]] = {}
    for model, x in pairs:
        by_model.setdefault(model, []).append(x)
    listed = ", ".join(f"{model} at {', '.join(map(str, xs))}" for model, xs in by_model.items())
    return f"{listed} {x_words}"


def _panels(compared: list[Comparison], question: Question) -> tuple[FigurePanel, ...]:
    by_place: dict[tuple[str, int], list[Comparison]] = {}
    for item in compared:
        if item.figure == question.figure:
            by_place.setdefault((item.model, item.x), []).append(item)
    return tuple(_panel(items, question) for items in by_place.values())


def _panel(items: list[Comparison], question: Question) -> FigurePanel:
    published = {item.series: item.published_token_per_dollar for item in items}
    ours = {item.series: item.our_token_per_dollar for item in items}
    first, second = sorted(items, key=lambda item: -item.published_token_per_dollar)[:2]
    lowest = first.published_token_per_dollar - first.published_error_half_width
    return FigurePanel(
        model=first.model,
        x=first.x,
        published_best=_best(published),
        our_best=tuple(name for name, value in ours.items() if value * WORTH_SAYING >= max(ours.values())),
        published_ratio=_ratio(published, question.challengers),
        our_ratio=_ratio(ours, question.challengers),
        published_out_of_memory=tuple(series for series, value in published.items() if not value),
        our_out_of_memory=tuple(series for series, value in ours.items() if not value),
        is_separated=lowest > second.published_token_per_dollar + second.published_error_half_width,
        is_unexplained=any(item.is_unexplained for item in items),
    )


def _best(values: dict[str, float]) -> str:
    return max(values, key=lambda series: values[series])


def _ratio(values: dict[str, float], challengers: tuple[str, ...]) -> float | None:
    challenging = max(value for series, value in values.items() if series in challengers)
    others = max(value for series, value in values.items() if series not in challengers)
    return challenging / others if challenging and others else None


def _aligned_panels() -> tuple[AlignedPanel, ...]:
    """Return a panel for each model and number of GPUs of figure 2, from predictions only."""
    by_place: dict[tuple[str, int], list[Point]] = {}
    for point in points():
        if point.figure == 2:
            by_place.setdefault((point.model, point.x), []).append(point)
    panels = []
    for (model, num_gpus), of_place in by_place.items():
        spec = paper_model(model)
        sibling = aligned_sibling(spec)
        as_is, aligned = _over_gpus(of_place, spec), _over_gpus(of_place, sibling)
        today = _over_gpus(of_place, sibling, TODAY)
        panels.append(
            AlignedPanel(
                model=model,
                change=describe_alignment(spec, sibling),
                num_gpus=num_gpus,
                best=_best(as_is),
                aligned_best=_best(aligned),
                h100_ratio=_ratio(as_is, ("h100-80gb",)),
                aligned_h100_ratio=_ratio(aligned, ("h100-80gb",)),
                today_best=_best(today),
                today_h100_ratio=_ratio(today, ("h100-80gb",)),
            )
        )
    return tuple(panels)


def _over_gpus(of_place: list[Point], spec: ModelSpec, software: Software = PAPER) -> dict[str, float]:
    """Return the best tokens per dollar of each GPU type, with `spec` instead of the paper's model."""
    return {
        point.series: max(cell_token_per_dollar(cell, spec, software) for cell in cells_of(point))
        for point in of_place
    }


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
"names of the series, similar to the paper's legends"
_RATIO_WORDS = {
    "q1": "FlashAttention over vanilla",
    "q2": "H100 over the better A100",
    "q3": "the better FSDP over DDP",
    "q4": "the better FSDP over DDP",
}


def paragraphs(answered: Answers) -> list[tuple[str, str]]:
    """Return the heading and the text of each paragraph."""
    return [
        *(
            (f"{question.key.upper()} {question.words}", _answer(question, answered.questions[question.key]))
            for question in QUESTIONS
        ),
        ("Contradictions between the paper's text and its figures", _disagreements(answered.disagreements)),
        (
            "Effect of widths in multiples of 8, as tensor cores need (predicted)",
            _alignment(answered.aligned),
        ),
    ]


def _answer(question: Question, panels: tuple[FigurePanel, ...]) -> str:
    return "\n".join(
        (
            f"Best: {_both(panels, _bests, question)}.",
            f"Tokens per dollar of {_RATIO_WORDS[question.key]}: {_ratios(panels)}.",
            f"Out of memory: {_both(panels, _out_of_memory, question)}.",
            _agreement(panels, question),
        )
    )


def _both(
    panels: tuple[FigurePanel, ...],
    words_of: Callable[[tuple[FigurePanel, ...], str, str], str],
    question: Question,
) -> str:
    published = words_of(panels, "published", question.x_words)
    ours = words_of(panels, "our", question.x_words)
    return f"{published} (ours: the same)" if ours == published else f"{published} (ours: {ours})"


def _bests(panels: tuple[FigurePanel, ...], whose: str, x_words: str) -> str:
    def best(panel: FigurePanel) -> str:
        return panel.published_best if whose == "published" else _either(panel.our_best)

    if len(everywhere := {best(panel) for panel in panels}) == 1:
        return f"{_word(everywhere.pop())} everywhere"
    places_of_models = [
        f"{model} {_spans((panel.x, best(panel)) for panel in of_model)}"
        for model, of_model in groupby(panels, key=lambda panel: panel.model)
    ]
    return f"{'; '.join(places_of_models)} {x_words}"


def _spans(bests: Iterable[tuple[int, str]]) -> str:
    """Return `DDP at 1, FSDP full at 2 to 8` for pairs of an x and the best series there."""
    spans = []
    for name, run in groupby(bests, key=lambda pair: pair[1]):
        xs = [x for x, _ in run]
        spans.append(f"{_word(name)} at {xs[0]}" + (f" to {xs[-1]}" if len(xs) > 1 else ""))
    return ", ".join(spans)


def _either(series: tuple[str, ...]) -> str:
    return "either FSDP" if series == FSDP else " or ".join(map(_word, series))


def _word(series: str) -> str:
    return SERIES_WORDS.get(series, series)


def _out_of_memory(panels: tuple[FigurePanel, ...], whose: str, x_words: str) -> str:
    by_series: dict[str, list[tuple[str, int]]] = {}
    for panel in panels:
        for series in getattr(panel, f"{whose}_out_of_memory"):
            by_series.setdefault(_word(series), []).append((panel.model, panel.x))
    return "; ".join(f"{word} for {places(pairs, x_words)}" for word, pairs in by_series.items()) or "none"


def _ratios(panels: tuple[FigurePanel, ...]) -> str:
    """Return each model's range of ratios over x, without unexplained points, and how many are above 1."""
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


def _agreement(panels: tuple[FigurePanel, ...], question: Question) -> str:
    counted = [panel for panel in panels if not panel.is_unexplained]
    separated = [panel for panel in counted if panel.is_separated]
    wrong = [panel for panel in separated if panel.published_best not in panel.our_best]
    same = sum(panel.published_best in panel.our_best for panel in counted)
    left_out = " (without unexplained panels)" if len(counted) < len(panels) else ""
    sentence = (
        f"Our best is the paper's best in {same} of {len(counted)} panels{left_out}, and in "
        f"{len(separated) - len(wrong)} of the {len(separated)} whose error bars don't overlap"
    )
    where = places(((panel.model, panel.x) for panel in wrong), question.x_words)
    return f"{sentence}: not for {where}." if wrong else f"{sentence}."


def _disagreements(disagreements: tuple[Disagreement, ...]) -> str:
    return "\n".join(
        f"({number}) Text: {item.sentence}. Figures: {item.figures_say}."
        for number, item in enumerate(disagreements, 1)
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
            f"Cheapest GPU with aligned widths: {'; '.join(bests)} GPUs. H100 is the cheapest in {after} of "
            f"{len(panels)} panels, with the paper's widths in {before}.",
            f"With today's software in steady state, at the paper's prices: {'; '.join(todays)} times. H100 "
            f"is the cheapest in {now} of {len(panels)} panels. The paper's runs have a slow first step and "
            "costs per layer that a faster GPU does not reduce; both affect the fastest GPU most.",
        )
    )


def aligned_sibling(spec: ModelSpec) -> ModelSpec:
    """Return the same shape with all widths in multiples of 8, as tensor cores need; an aligned spec as is.

    FFN and hidden size are rounded to the nearest multiple of 64, a head's width to the nearest multiple of
    8: the model keeps its size. The vocabulary is rounded up: every token needs its row.
    """
    changes = {
        name: _nearest(getattr(spec, name), ALIGNED_TO)
        for name in ("ffn_size", "hidden_size")
        if not is_aligned(getattr(spec, name))
    }
    if not is_aligned(spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim):
        changes["head_dim"] = _nearest(spec.head_dim, ALIGNMENT)
    if not is_aligned(spec.vocab_size):
        changes["vocab_size"] = -(-spec.vocab_size // ALIGNED_TO) * ALIGNED_TO
    return dataclasses.replace(spec, **changes)


def _nearest(width: int, multiple: int) -> int:
    return max(multiple, round(width / multiple) * multiple)


def describe_alignment(spec: ModelSpec, aligned: ModelSpec) -> str:
    words = {"FFN": "ffn_size", "hidden": "hidden_size", "heads of": "head_dim", "vocabulary": "vocab_size"}
    pairs = [(word, getattr(aligned, name), getattr(spec, name)) for word, name in words.items()]
    return ", ".join(f"{word} {after} for {before}" for word, after, before in pairs if after != before)
