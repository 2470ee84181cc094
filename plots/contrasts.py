"""The comparisons of docs/results.md, which were fixed here before the scores that test them were there.

    CONTRASTS   the list; what is added to it later is tested by samples that are answered later
    outcomes    each on the samples that nobody had seen when it was chosen, with Holm's correction over the whole list

Whoever looks at scores and then picks what to test finds something in any noise. So a comparison says how many samples
of its task were known when it was chosen, and those do not test it. One chosen when all were known is no test: it is
told as chosen afterwards, and corrected for all comparisons of its kind.

Not here: the page (`plots/findings.py`), scores (`plots/evidence.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvbench.plots.evidence import FULL, HIDDEN, SHOWN, Place, Scores, less
from kvbench.plots.stats import Corrected, corrected_over

OTHER_SCOPE = "shown"


@dataclass(frozen=True)
class Contrast:
    """A method at a budget against another, against full attention, or against itself with the question shown."""

    asked: str  # a set's key
    place: Place
    against: str  # a method, "full", or "shown"
    seen: int  # samples of the set, the first ones, whose scores were known when this was chosen

    @property
    def beside(self) -> Place:
        scope, memory, method = self.place
        return (SHOWN, memory, method) if self.against == OTHER_SCOPE else (scope, memory, self.against)

    def of(self, sets: Sequence[Scores]) -> Scores | None:
        """The scores of its set, where both places were asked."""
        return next(
            (one for one in sets if one.asked.key == self.asked and {self.place, self.beside} <= one.of.keys()), None
        )

    def has_room(self, scores: Scores) -> bool:
        return all(scores.has_room(scope, memory) for scope, memory, _ in (self.place, self.beside))

    def fresh(self, sets: Sequence[Scores]) -> tuple[Mapping[str, float], Mapping[str, float]] | None:
        """Both places' scores on the samples that test it; None where there are none, or nothing can be lost."""
        scores = self.of(sets)
        if scores is None or not self.has_room(scores):
            return None
        one, other = (dict([*scores.of[place].items()][self.seen :]) for place in (self.place, self.beside))
        both = [sample for sample in one if sample in other]
        return ({s: one[s] for s in both}, {s: other[s] for s in both}) if both else None


# 23 November 2026: 41 of 100 questions on documents and all needles with the question shown were known, nothing else.
CONTRASTS = (
    Contrast("docs", (HIDDEN, "0.125", "snapkv"), OTHER_SCOPE, 41),
    Contrast("docs", (HIDDEN, "0.125", "pqcache"), "snapkv", 41),
    Contrast("docs", (HIDDEN, "0.125", "kvzip"), "snapkv", 41),
    Contrast("docs", (SHOWN, "0.0625", "kvzip"), "snapkv", 41),
    Contrast("docs", (SHOWN, "0.25", "kivi"), FULL, 41),
    Contrast("docs", (SHOWN, "0.0625", "tova"), FULL, 41),
    Contrast("needle", (HIDDEN, "0.125", "kvzip"), "snapkv", 0),
    Contrast("needle-name", (HIDDEN, "0.125", "snapkv"), OTHER_SCOPE, 0),
    Contrast("variables", (SHOWN, "0.125", "pqcache"), "snapkv", 0),
    Contrast("keys", (SHOWN, "0.125", "pqcache"), "snapkv", 0),
    Contrast("shared", (HIDDEN, "0.25", "kvzip"), "snapkv", 0),
    Contrast("sums", (SHOWN, "0.25", "pqcache"), "snapkv", 0),
    # 24 November 2026: of two needles at once full attention's first ten were known, no method's.
    Contrast("needle-two", (SHOWN, "0.25", "pqcache"), "snapkv", 0),
    Contrast("needle-two", (HIDDEN, "0.125", "kvzip"), "snapkv", 0),
    # Later that day: while generating, full attention's first two samples were known, no method's. Of sums after
    # solved ones the first 32 were known of full attention, SnapKV, StreamingLLM and PQCache, and 24 of the others.
    Contrast("generating", (SHOWN, "96", "rkv"), FULL, 0),
    Contrast("generating", (SHOWN, "96", "rkv"), "snapkv_decode", 0),
    Contrast("generating", (SHOWN, "96", "rkv"), "streamingllm_decode", 0),
    Contrast("sums", (SHOWN, "0.25", "streamingllm"), FULL, 32),
    # Of the most frequent words full attention's first five were known, no method's.
    Contrast("words", (SHOWN, "0.125", "pqcache"), "snapkv", 0),
)
LOOKED = (
    Contrast("needle", (SHOWN, "0.125", "keydiff"), "snapkv", 60),
    Contrast("needle-name", (SHOWN, "0.125", "keydiff"), "snapkv", 60),
)


def outcomes(sets: Sequence[Scores], contrasts: Sequence[Contrast] = CONTRASTS) -> dict[Contrast, Corrected]:
    """Outcomes of contrasts that can be tested so far; the others count in the correction as if their p were larger."""
    pairs = {one: less(*found) for one in contrasts if (found := one.fresh(sets)) is not None}
    return corrected_over(pairs, len(contrasts))


def looked_at(contrast: Contrast, scores: Scores) -> Corrected | None:
    """A contrast on all samples, among all comparisons of its kind."""
    scope, memory, method = contrast.place
    if contrast.against == FULL:
        return scores.against_full.get(contrast.place)
    if contrast.against == OTHER_SCOPE:
        return scores.hiding.get(contrast.place)
    pairs = scores.between(scope, memory)
    turned = pairs.get((contrast.against, method))
    return pairs.get((method, contrast.against)) or (None if turned is None else turned.turned)
