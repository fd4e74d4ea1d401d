"""Reward for the words that answer and label share."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

from slime.plugin import Context, Reward, Sample
from slime_rewards.extraction import answer_in, labels_of, plain_text
from slime_rewards.options import F1Options

_ARTICLES = re.compile(r"\b(a|an|the)\b")
#: labels that are a verdict, which share no words with any other answer
_VERDICTS = (["yes"], ["no"], ["noanswer"])
_PUNCTUATION = str.maketrans("", "", string.punctuation)


class F1:
    """Token F1 of answer and label, in [0, 1], as in the evaluation of SQuAD.

    Both are normalized: lower case, without punctuation and articles, split at white space. With c words in common
    (repeated words count as often as both have them), precision is p = c / (words of the answer) and recall is
    r = c / (words of the label); F1 = 2pr / (p + r), and 0 if c = 0. If answer or label has no words, the reward is 1
    if both have none, else 0. `yes`, `no` and `noanswer` have F1 0 with everything but themselves, as in the evaluation
    of HotpotQA: "no one" is not half of "no". If the label is a JSON list of strings, the best match among them counts.

    `measure="exact"`: 1 if the normalized texts are equal. `measure="contains"`: 1 if the answer contains the label's
    words in sequence. A sample without label raises `ValueError` and fails.

    Sources: Rajpurkar et al. 2016, "SQuAD: 100,000+ Questions for Machine Comprehension of Text", section 6.1; Yang et
    al. 2018, "HotpotQA: A Dataset for Diverse, Explainable Multi-hop Question Answering", section 5.2.
    """

    def __init__(self, options: F1Options, context: Context) -> None:  # noqa: ARG002 - the factory contract
        self._options = options

    async def score(self, samples: Sequence[Sample]) -> list[Reward]:
        """One reward per sample, in the same order."""
        return [Reward(self._score(sample)) for sample in samples]

    def _score(self, sample: Sample) -> float:
        labels = [words_of(plain_text(one) if self._options.boxed else one) for one in labels_of(sample)]
        answer = answer_in(sample.response, self._options)
        if answer is None:
            return 0.0
        words = words_of(answer)
        return max(self._agreement(words, label) for label in labels)

    def _agreement(self, answer: list[str], label: list[str]) -> float:
        if self._options.measure == "f1":
            return f1_of(answer, label)
        if self._options.measure == "exact" or not label:
            return float(answer == label)
        return float(f" {' '.join(label)} " in f" {' '.join(answer)} ")


def words_of(text: str) -> list[str]:
    """The words of a text, normalized."""
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def f1_of(answer: Sequence[str], label: Sequence[str]) -> float:
    """F1 of two lists of words."""
    if not answer or not label or list(answer) in _VERDICTS or list(label) in _VERDICTS:
        return float(list(answer) == list(label))
    common = sum((Counter(answer) & Counter(label)).values())
    if common == 0:
        return 0.0
    precision, recall = common / len(answer), common / len(label)
    return 2 * precision * recall / (precision + recall)
