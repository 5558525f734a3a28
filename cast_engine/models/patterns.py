"""Taking a regular expression apart into its alternatives, so that each can be held to account."""

from __future__ import annotations

from itertools import product


def alternatives(expression: str) -> list[str]:
    r"""Return the expressions without ``|`` that together match what this one matches.

    PEFT drops what matches nothing without a word: in ``attn\.(to_q|to_w)`` half of the list could be a typing error.
    Groups that repeat, look around or capture by name stay whole.

    >>> alternatives(r"a\.(b|c)|d")
    ['a\\.b', 'a\\.c', 'd']
    >>> alternatives(r"x\.(a|b)+")
    ['x\\.(a|b)+']
    """
    out: list[str] = []
    for branch in _split(expression):
        pieces = [_expand(piece) for piece in _pieces(branch)]
        out += ["".join(choice) for choice in product(*pieces)]
    return list(dict.fromkeys(out))


def _expand(piece: str) -> list[str]:
    if not (piece.startswith("(") and piece.endswith(")")):
        return [piece]
    inner = piece[1:-1]
    if inner.startswith("?:"):
        return alternatives(inner[2:])
    return [piece] if inner.startswith("?") else alternatives(inner)


def _tokens(expression: str) -> list[str]:
    """Return characters, with escapes and character classes as one token each."""
    out, i = [], 0
    while i < len(expression):
        end = i + 1
        if expression[i] == "\\":
            end = i + 2
        elif expression[i] == "[":
            end = expression.find("]", i + (3 if expression[i + 1 : i + 2] == "^" else 2)) + 1 or len(expression)
        out.append(expression[i:end])
        i = end
    return out


def _split(expression: str) -> list[str]:
    """Split at every ``|`` outside groups."""
    branches, depth = [""], 0
    for part in _tokens(expression):
        depth += (part == "(") - (part == ")")
        if part == "|" and depth == 0:
            branches.append("")
        else:
            branches[-1] += part
    return branches


def _pieces(branch: str) -> list[str]:
    """Split a branch into groups and what lies between; a repeated group takes its repetition along."""
    pieces, depth = [""], 0
    for part in _tokens(branch):
        if (part == "(" and depth == 0) or (
            depth == 0 and pieces[-1].endswith(")") and part not in {"*", "+", "?", "{"}
        ):
            pieces.append("")
        depth += (part == "(") - (part == ")")
        pieces[-1] += part
    return [piece for piece in pieces if piece]
