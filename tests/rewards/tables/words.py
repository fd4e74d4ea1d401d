"""Answers in words and numbers, as in HotpotQA, SQuAD, TriviaQA and GSM8K."""

from __future__ import annotations

_2_3, _1_2, _4_5, _6_7, _2_5 = 2 / 3, 1 / 2, 4 / 5, 6 / 7, 2 / 5

#: (label, answer, F1, equal, contained)
F1: list[tuple[str, str, float, float, float]] = [
    # equal, up to case, punctuation and articles
    ("Denver Broncos", "Denver Broncos", 1, 1, 1),
    ("Denver Broncos", "denver broncos", 1, 1, 1),
    ("Denver Broncos", "the Denver Broncos", 1, 1, 1),
    ("Denver Broncos", "The Denver Broncos.", 1, 1, 1),
    ("The Beatles", "beatles", 1, 1, 1),
    ("an apple", "apple", 1, 1, 1),
    ("U.S.", "US", 1, 1, 1),
    ("Moore's law", "Moores law", 1, 1, 1),
    ("rock-and-roll", "rockandroll", 1, 1, 1),
    ("Denver  Broncos", " Denver\nBroncos ", 1, 1, 1),
    ("1,000", "1000", 1, 1, 1),
    ("10%", "10", 1, 1, 1),
    ("$5", "5", 1, 1, 1),
    ("-5", "5", 1, 1, 1),  # punctuation goes, so signs do: use math for numbers
    # in part
    ("Denver Broncos", "Denver", _2_3, 0, 0),
    ("Denver", "Denver Broncos", _2_3, 0, 1),
    ("Denver Broncos", "The winner was the Denver Broncos", _2_3, 0, 1),
    ("Denver Broncos", "Broncos Denver", 1, 0, 0),
    ("Santa Clara, California", "Santa Clara", _4_5, 0, 0),
    ("Santa Clara", "Santa Clara, California", _4_5, 0, 1),
    ("cat", "cat cat", _2_3, 0, 1),
    ("cat cat", "cat", _2_3, 0, 0),
    ("February 7, 2016", "7 February 2016", 1, 0, 0),
    ("February 7, 2016", "2016", _1_2, 0, 0),
    ("gold and silver", "gold, silver", _4_5, 0, 0),
    ("Saint Bernadette Soubirous", "to Saint Bernadette Soubirous", _6_7, 0, 1),
    ("four score", "four score and seven years ago maybe so", _2_5, 0, 1),
    # nothing in common
    ("Denver Broncos", "Carolina Panthers", 0, 0, 0),
    ("cat", "catalog", 0, 0, 0),
    ("1876", "1867", 0, 0, 0),
    ("Paris", "", 0, 0, 0),
    ("Paris", "I do not know", 0, 0, 0),
    ("Paris", "数学 🙂", 0, 0, 0),
    # yes and no: equal or nothing, as in HotpotQA
    ("yes", "yes", 1, 1, 1),
    ("yes", "Yes.", 1, 1, 1),
    ("yes", "YES!", 1, 1, 1),
    ("yes", "no", 0, 0, 0),
    ("yes", "yes it is", 0, 0, 1),
    ("no", "no", 1, 1, 1),
    ("no", "No.", 1, 1, 1),
    ("no", "yes", 0, 0, 0),
    ("no", "no one", 0, 0, 1),
    ("no", "there is no way", 0, 0, 1),
    ("no one", "no", 0, 0, 0),
    ("yes man", "yes", 0, 0, 0),
    ("noanswer", "noanswer", 1, 1, 1),
    ("noanswer", "noanswer here", 0, 0, 1),
    ("yes or no", "yes no", _4_5, 0, 0),
    # several labels: the best counts
    ('["NYC", "New York City"]', "New York City", 1, 1, 1),
    ('["NYC", "New York City"]', "nyc", 1, 1, 1),
    ('["NYC", "New York City"]', "New York", _4_5, 0, 0),
    ('["NYC", "New York City"]', "Boston", 0, 0, 0),
    ('["no", "nope"]', "nope", 1, 1, 1),
    ('["broken', "broken", 1, 1, 1),
    # neither has words
    ("the", "a", 1, 1, 1),
    ("...", "!", 1, 1, 1),
    ("the", "cat", 0, 0, 0),
    # other scripts
    ("Köln", "köln", 1, 1, 1),
    ("Köln", "Koln", 0, 0, 0),
    ("北京", "北京", 1, 1, 1),
    ("北京 市", "北京", _2_3, 0, 0),
    ("Café", "café!", 1, 1, 1),
]

#: the same for the content of a box
F1_BOXED: list[tuple[str, str, float, float, float]] = [
    ("Paris", r"\text{Paris}", 1, 1, 1),
    ("Denver Broncos", r"\text{the Denver Broncos}", 1, 1, 1),
    ("Denver Broncos", r"\text{Denver}", _2_3, 0, 0),
    ("Denver Broncos", r"\text{Denver}\ \text{Broncos}", 1, 1, 1),
    ("Denver Broncos", r"\textbf{\text{Denver Broncos}}", 1, 1, 1),
    (r"\text{Paris}", r"\mathrm{Paris}", 1, 1, 1),
    ("Paris", r"\text{London}", 0, 0, 0),
    ("yes", r"\text{Yes}", 1, 1, 1),
    ("no", r"\text{no one}", 0, 0, 1),
    ("1,200", r"1{,}200", 1, 1, 1),
]

#: (label, answer, equal as text, equal without case, equal by the last number)
EXACT: list[tuple[str, str, bool, bool, bool]] = [
    # text
    ("Paris", "Paris", True, True, False),
    ("Paris", " Paris\n", True, True, False),
    ("Paris", "paris", False, True, False),
    ("Paris", "PARIS", False, True, False),
    ("Paris", "Paris.", False, False, False),
    ("Paris", "London", False, False, False),
    ("Paris", "", False, False, False),
    ("", "", True, True, False),
    ("", "Paris", False, False, False),
    ("Straße", "STRASSE", False, True, False),
    ("数学", "数学", True, True, False),
    ("New York", "New  York", False, False, False),
    ("the Beatles", "Beatles", False, False, False),
    ("True", "true", False, True, False),
    (r"\frac{1}{2}", r"\frac{1}{2}", True, True, True),
    # numbers
    ("72", "72", True, True, True),
    ("72", "72.0", False, False, True),
    ("72", "72.", False, False, True),
    ("72", "072", False, False, True),
    ("72", "73", False, False, False),
    ("72", "-72", False, False, False),
    ("-72", "-72", True, True, True),
    ("-72", "72", False, False, False),
    ("-72", "27-72", False, False, False),
    ("72", "27-72", False, False, True),
    ("72", "+72", False, False, True),
    ("72", "72 clips", False, False, True),
    ("72", "She sold 48+24=72 clips", False, False, True),
    ("72", "72 clips in 2 months", False, False, False),
    ("72", "72%", False, False, True),
    ("0.5", ".5", False, False, True),
    ("0.5", "0.50", False, False, True),
    ("0.5", "1/2", False, False, False),
    ("1200", "1,200", False, False, True),
    ("1,200", "1200", False, False, True),
    ("1200", "1,200.00", False, False, True),
    ("12,345,678", "12345678", False, False, True),
    ("1200", "1,2,00", False, False, False),
    ("1.5", "1,5", False, False, False),
    ("5", "**5**", False, False, True),
    ("5", "(5)", False, False, True),
    ("5", "five", False, False, False),
    ("five", "Five", False, True, False),
    ("5", "x=5", False, False, True),
    ("5", "x=-5", False, False, False),
    ("-5", "x=-5", False, False, True),
    ("3", "10 - 7 = 3", False, False, True),
    ("123456789012345678901", "123456789012345678901", True, True, True),
    ("123456789012345678901", "123456789012345678902", False, False, False),
    ("0.1", "0.10000000000000001", False, False, False),
]

#: the same for the content of a box
EXACT_BOXED: list[tuple[str, str, bool, bool, bool]] = [
    ("Paris", r"\text{Paris}", True, True, False),
    ("Paris", r"\textbf{paris}", False, True, False),
    (r"\text{Paris}", "Paris", True, True, False),
    ("Paris", r"\text{ Paris }", True, True, False),
    ("Paris", r"\text{London}", False, False, False),
    ("1200", r"1{,}200", False, False, True),
    ("1200", r"1,\!200", False, False, True),
    ("1,200", r"1{,}200", True, True, True),
    ("1200", r"1\,200", True, True, True),
    ("18", r"\$18", True, True, True),
    ("18", r"18\text{ dollars}", False, False, True),
    ("50%", r"50\%", True, True, True),
    ("5", "$5$", True, True, True),
    ("5", r"\boxed{5}", True, True, True),
    ("5", r"-5", False, False, False),
    (r"\frac{1}{2}", r"\frac{1}{2}", True, True, True),
]

#: the same for an answer without a box, where `$` is part of the text
EXACT_UNBOXED: list[tuple[str, str, bool, bool, bool]] = [
    ("72", "$72", False, False, True),
    ("$72", "72", False, False, True),
    ("Paris", r"\text{Paris}", False, False, False),
    ("1200", r"1{,}200", False, False, False),
]
