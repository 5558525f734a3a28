"""How a judge is asked, and which answers count, as GenEval 2's Soft-TIFA does it."""

from __future__ import annotations

from schemas.graph import Atom, AtomKind

ANSWER_SUFFIX = "Answer in one word."
NEUTRAL_QUESTION = "Describe the image."
"""Asks for nothing in particular: the attention it leaves is what to divide by."""

_DIGITS = {
    word: str(i)
    for i, word in enumerate(("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"), start=1)
}
_NO_DIGIT = "other"  # what GenEval 2 looks up for a number word it has no digit for


def answer_text(question: str) -> str:
    """Return the text of the user's turn after the image."""
    return f"{question} {ANSWER_SUFFIX}"


def variants(atom: Atom) -> list[str]:
    """Return the answers that count as right, in GenEval 2's order.

    A score is the sum of their first tokens' probabilities. For anything but a count the answer is yes, whatever the
    atom says; variants whose first tokens coincide are kept, so that their sum can be reproduced as published.
    """
    if atom.kind is not AtomKind.COUNT:
        return ["Yes", "yes", " yes", " Yes"]
    word = atom.expected.lower()
    digit = _DIGITS.get(word, _NO_DIGIT)
    return [word, word.capitalize(), f" {word}", f" {word.capitalize()}", digit, f" {digit}"]
