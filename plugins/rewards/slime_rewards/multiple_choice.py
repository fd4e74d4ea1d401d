"""Reward for choosing the label's letter or number."""

from __future__ import annotations

import re
from collections.abc import Sequence

from slime.plugin import Context, Reward, Sample
from slime_rewards.denials import APPROVED, DOUBT, NOT, REFUSED, RULING_OUT
from slime_rewards.extraction import describe, label_of, last_boxed, marked_in, plain_text
from slime_rewards.options import MultipleChoiceOptions

_ONLY = re.compile(
    r"[(\[{*$`\"'\u201c\u2018\uff08]{0,4}\s{0,4}([A-Za-z]|\d{1,2})\s{0,4}[)\]}*$`\"'.:,;\u201d\u2019\uff09\u3002]{0,4}"
)
_STYLE = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mathit)(?=\s*\{)")
#: a choice with its text in a box, "B. Paris" or "(B) 12", and any further one after it, "A) 1 or B) 2"
_WITH_TEXT = re.compile(r"\s*(?:[(\[]([A-Za-z]|\d{1,2})[)\]]|([A-Za-z])[).:])\s")
_FURTHER = re.compile(r"(?<![\w.])[(\[]?[A-Za-z][)\].:](?=\s|$)")
#: "the answer is (B)", "Answer: B", "option B", "the answer must be choice **C**", "答案是B", "La respuesta es B".
#: After "answer", `a` and `I` before another word are words, not choices. In other languages a verb or a colon must
#: follow, and every vowel before another word is a word. The first digits of 1.5 and 1,000 are not choices either.
_SAID = re.compile(
    r"(?:\b(?:(?P<answer>answer)|option|choice)\b\*{0,2}"
    rf"(?P<negated>\s{{1,4}}(?:(?:is|was|ca|could|should|would)\s{{0,4}})?{NOT}(?:\s{{1,4}}be)?)?"
    r"|\b(?P<abroad>respuesta|resposta|risposta|r[ée]ponse|antwort|ответ)\b\*{0,2}"
    r"(?:\s{1,4}(?:correct[ae]|correta|corretta|final[ea]?)\b\*{0,2})?(?=\s{1,4}(?:es|est|ist|é|è)\b|\s{0,4}[:=\uff1a])"
    r"|(?:答案|选项|选择|选|答え|正解|정답)\s{0,2}(?:就|应该?)?(?P<not_so>不)?)"
    r"(?P<stated>\s{1,4}(?:(?:is|es|est|ist|é|è)\b|(?:must|should|would|has\s{1,4}to)\s{1,4}be)(?:\s{1,4}(?:clearly|definitely|"
    r"certainly|obviously|indeed|simply|(?:most\s{1,4})?(?:likely|probably)|therefore|thus|then))?|[是为は은는])?"
    r"\s{0,4}(?P<colon>[:=\uff1a])?(?:[*_\s]|(?<=\n)>){0,5}"
    r"(?:(?:option|choice|letter)\s{1,4})?[(\[{$`\"'\u201c\u2018\u00ab\uff08]{0,4}"
    r"(?(answer)(?!(?-i:[aI])\s{1,4}\w))(?(abroad)(?!(?-i:[aeiouy])\s{1,4}\w))"
    r"(?P<choice>[A-Za-z]|\d{1,2})(?![A-Za-z0-9]|_\w|['\u2019][a-z]|[.,]\d|\s?\\?%)",
    re.IGNORECASE,
)
#: words for a wrong choice, in all languages
_WRONG = (
    rf"(?:{REFUSED}|\b(?:falsch|fau(?:x|sse)|fals[ao]|incorrect[aeo]|errad[ao]|sbagliat[ao]|не(?:верн|правильн)\w*)\b)"
)
#: what stands on the same line before a choice that is not made: "not option A", "it is false that the answer is A"
_NOT_BEFORE = re.compile(
    rf"(?:{NOT}|\b(?:neither|nor)|{RULING_OUT})[^\S\n]+(?:be[^\S\n]+)?(?:the[^\S\n]+)?$"
    rf"|(?:{NOT}[^\S\n]+(?:think|believe|say|(?:true|the[^\S\n]case|correct|right|possible|likely|clear|sure|certain)[^\S\n]+that)"
    rf"|{REFUSED}[^\S\n]+(?:to[^\S\n]+(?:think|believe|say|claim|assume|choose|pick|select)|that))[^\S\n]+(?:that[^\S\n]+)?"
    r"(?:the[^\S\n]+(?:(?:best|correct|right)[^\S\n]+)?)?$|不\s?$",
    re.IGNORECASE,
)
#: brackets and marks behind a choice
_CLOSING = r"[)\]}*$`\"'\u201d\u2019\u00bb\uff09]{0,6}"
#: what denies "A" in "A and option B are wrong"
_BOTH_WRONG = (
    r"\s(?:and|n?or)\s(?:option\s|choice\s)?\(?[A-Z]\)?\s(?:are|were)\s(?:(?:both|all|also)\s)*"
    rf"(?:{NOT}|{REFUSED})"
)
_ADVERBS = r"(?:(?:(?!only)[a-z]{2,12}ly|also|thus|therefore|to|been|be)\s+){0,3}"
#: what denies a choice that is only named: "option A is wrong", "option A cannot be it". In "option (D) Never" it is
#: the option's own text.
_NAMED_NOT = re.compile(
    rf"{_CLOSING}\s{{0,4}}(?:(?:is|are|was|has|have|seems|looks|ca|can|could|should|would|must|may|might|do|does|did|wo|will"
    rf"|est|ist|是)\s{{0,4}}{_ADVERBS}(?:{NOT}(?!\s+{_WRONG})|{_WRONG}|\bnicht\b|错)"
    r"|n['\u2019]est\s+pas\b|(?-i:cannot)\b)"
    rf"|\*{{0,2}}[^\S\n]{{1,4}}(?:{_WRONG}|(?:not|never)\b(?!\s+[(\[]?[A-Z]\b))"
    rf"|{_CLOSING}[^\S\n]?(?:不(?!选)|错)|(?:,\s[A-Z]\b){{0,4}},?{_BOTH_WRONG}",
    re.IGNORECASE,
)
#: what denies a choice that is stated. Other than "Answer: A is wrong", what follows is mostly the option's own text,
#: as in "Answer: (D) Cannot be determined" and "Answer: B. False".
_STATED_NOT = re.compile(
    rf"{_CLOSING}[^\S\n]{{0,4}}(?:(?-i:is|are|was|es|est|ist|é|è)\s{{0,4}}{_ADVERBS}"
    rf"(?:{_WRONG}|{NOT}\s+{APPROVED})|(?-i:can(?:no|['\u2019])t)\s+be\s+{APPROVED}"
    rf"|не(?:верн|правильн)|不对|不正确|是错|(?:では|じゃ)(?:な|あり)|[가이]\s?아니)|{_BOTH_WRONG}",
    re.IGNORECASE,
)
#: "option B is correct" states it
_CONFIRMED = re.compile(rf"{_CLOSING}[^\S\n]{{0,4}}(?:is|was|must\s+be|seems)\s+{_ADVERBS}{APPROVED}", re.IGNORECASE)
#: "not A but C"
_BUT = re.compile(
    r"(?:\s{0,4}(?:,|\bn?or\b)\s{0,4}[A-Z]\b){0,4}[)\]}*`\"'.,;\s\uff09\uff0c]{0,6}(?:而?是|(?:but|rather|it['\u2019]?s|it\s+is)\s)\s*(?:rather\s+)?(?:it['\u2019]?s\s+|it\s+is\s+)?(?:option\s+|choice\s+)?"
    r"[(\[{*`\"']{0,4}([A-Z]|\d{1,2})(?!\w)"
)
_OR = r"(?:or|and|oder|und|ou|et|[oyeи]|или)\b(?:\s+bien\b)?"
#: a second choice or a doubt: "A or B", "A, C", "A/B", "A?", "A, or maybe B", "A, but it could be B", "A, perhaps."
_SECOND = re.compile(
    rf"{_CLOSING}\s?[?\uff1f]"
    rf"|(?:\*{{0,2}}[^\S\n]|{_CLOSING}\s?(?:[(,;]|\.{{3}}|\u2026|\b(?:or|and|but)\b))[\s,]{{0,2}}(?:(?:or|and|but|(?:al)?though)\s+)?(?:it\s+)?"
    rf"{DOUBT}(?:\s*(?:[.!?)]|$)|\s+(?:also\s+|be\s+|option\s+|choice\s+){{0,3}}[(\[*]{{0,3}}(?:[A-HJ-Z]|\d{{1,2}})(?!\w))"
    r"|[()\]}*$`\"'\s\u00bb\uff09]{0,6}(?:(?:\.{3}|[\u2026\u2013\u2014])\s?)?"
    rf"(?:[,/&;]|\b{_OR}|或者?|和|、|또는|または|か)+\s*(?:{_OR}\s+)?(?:option\s+|choice\s+)?[(\[{{*$`\"'\u00ab\uff08]{{0,4}}"
    r"(?:[A-HJ-Z]|I(?!\s+\w)|\d{1,2})(?=[)\]}*$`\"'.,;!?\s\uff09]|$|或|和|、|。|[ぁ-ん가-힣])"
    r"(?!\s+[a-z]{2,}(?<!\bor)(?<!\band)(?<!\bboth))"
)
#: characters at the end of the answer that are searched
_TAIL = 10_000


class MultipleChoice:
    r"""1.0 if the response makes the label's choice, else 0.0.

    A choice is a letter, in either case, or a number of at most two digits, with or without brackets and punctuation.
    The response's choice is the first of these that exists: the last box, if it has a choice (`\boxed{B}`,
    `\boxed{\text{(B)}}`, `\boxed{B. Paris}`); the last "answer is (B)", "Answer: B" or "option B is correct"; the
    last "option B"; with `bare`, the last line of the answer if it consists of a choice. With `boxed`, only the
    last box counts. A response without a choice gets 0, and part `chosen` is then 0. Letters in running text are
    never taken for a choice, nor are two choices beside each other (`A or B`). A negated choice is not made: "not
    option A", "choice A is wrong".

    A sample without label, or whose label is not a choice, raises `ValueError` and fails.
    """

    def __init__(self, options: MultipleChoiceOptions, context: Context) -> None:  # noqa: ARG002 - the contract
        self._options = options

    async def score(self, samples: Sequence[Sample]) -> list[Reward]:
        """One reward per sample, in the same order."""
        return [self._score(sample) for sample in samples]

    def _score(self, sample: Sample) -> Reward:
        label = _only(label_of(sample))
        if label is None:
            raise ValueError(f"{describe(sample)} has the label {sample.label!r:.100}; expected one letter or number")
        choice = self._choice(sample.response)
        return Reward(float(choice == label), {"chosen": float(choice is not None)})

    def _choice(self, response: str) -> str | None:
        answer = marked_in(response, self._options)
        if answer is None:
            return None
        answer = answer[-_TAIL:]
        boxed = last_boxed(answer)
        choice = None if boxed is None else _in_box(plain_text(boxed))
        if choice is not None or self._options.boxed:
            return choice
        if (choice := _said(answer)) is not None or not self._options.bare:
            return choice
        return _only(answer.rstrip().rpartition("\n")[2])


def _in_box(text: str) -> str | None:
    """The choice that the text of a box makes; None if it makes none, or several."""
    if (choice := _only(text) or _said(text)) is not None:
        return choice
    found = _WITH_TEXT.match(text)
    if found is None or _FURTHER.search(text, found.end()):
        return None
    return (found.group(1) or found.group(2)).upper()


def _said(text: str) -> str | None:
    """The choice of the last "answer is (B)" or the like that is not negated; None if that one names several.

    A choice that is only named, "option A", is made if no letter is stated, before or behind it: not after "Answer: B",
    but in "The answer is 12, which is option C".
    """
    text = _STYLE.sub("", text)
    named: list[str | None] = []
    for said in reversed(list(_SAID.finditer(text))):
        behind = text[said.end("choice") : said.end("choice") + 60]
        stated = said["stated"] or said["colon"]
        denial = _STATED_NOT if stated else _NAMED_NOT
        negated = (
            said["negated"]
            or said["not_so"]
            or _NOT_BEFORE.search(text[max(0, said.start() - 40) : said.start()])
            or denial.match(behind)
        )
        if negated:
            if (but := _BUT.match(behind)) is None:
                continue
            choice: str | None = but[1].upper()
        else:
            choice = None if _SECOND.match(behind) else said["choice"].upper()
        if not named:
            named.append(choice)
        if stated or said["answer"] or _CONFIRMED.match(behind):
            return choice if choice is not None and choice.isalpha() else named[0]
    return named[0] if named else None


def _only(text: str) -> str | None:
    """The choice that a text consists of; None for any other text."""
    found = _ONLY.fullmatch(text.strip())
    return found.group(1).upper() if found else None
