"""Words the prompt grammar knows: numbers, adjectives, and how nouns form their plural."""

from __future__ import annotations

import re

NUMBERS = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
COUNTS = ("zero", *NUMBERS)
"""Answers to "How many?": the word at index n says n."""
VAGUE = ("some", "several", "many")
"""Determiners that name a group without saying how many."""

_ADJECTIVE_WORDS = """
red orange yellow green blue purple pink brown black white grey gray violet turquoise cyan magenta teal beige
golden gold silver bronze maroon navy crimson scarlet lavender indigo lilac olive tan cream ivory amber
wooden wood stone metal metallic glass plastic leather paper cardboard rubber ceramic porcelain marble concrete
brick steel iron copper brass cotton silk velvet woollen woolen wool denim crystal clay wax ice straw bamboo
felt fabric knitted crocheted
striped spotted checkered chequered dotted plaid sparkling sparkly glittery shiny glossy matte transparent
translucent glowing furry fluffy fuzzy hairy feathered scaly rusty dusty dirty clean wet dry cracked broken
patterned floral painted polished colorful colourful rainbow plain
big small large tiny little huge giant gigantic tall short long wide narrow thick thin fat slim round square
oval rectangular triangular flat curved old new young ancient modern antique vintage
"""  # colours; materials; patterns and surfaces; sizes, shapes and ages
ADJECTIVES = frozenset(_ADJECTIVE_WORDS.split())

_IRREGULAR = {
    "man": "men", "woman": "women", "child": "children", "person": "people", "mouse": "mice", "goose": "geese",
    "foot": "feet", "tooth": "teeth", "ox": "oxen", "leaf": "leaves", "loaf": "loaves", "knife": "knives",
    "wife": "wives", "life": "lives", "wolf": "wolves", "calf": "calves", "half": "halves", "shelf": "shelves",
    "elf": "elves", "thief": "thieves", "scarf": "scarves", "hoof": "hooves", "cactus": "cacti", "tomato": "tomatoes",
    "potato": "potatoes", "hero": "heroes", "mango": "mangoes", "volcano": "volcanoes", "torpedo": "torpedoes",
    "quiz": "quizzes", "bus": "buses", "gas": "gases", "lens": "lenses", "iris": "irises", "canvas": "canvases",
    "atlas": "atlases", "walrus": "walruses", "octopus": "octopuses", "platypus": "platypuses", "crocus": "crocuses",
    "human": "humans", "axe": "axes", "shoe": "shoes", "toe": "toes", "canoe": "canoes", "cache": "caches",
    "headache": "headaches", "cookie": "cookies", "brownie": "brownies", "smoothie": "smoothies", "pie": "pies",
    "tie": "ties", "movie": "movies", "zombie": "zombies", "genie": "genies", "hoodie": "hoodies",
    "magpie": "magpies", "selfie": "selfies", "birdie": "birdies", "budgie": "budgies", "pixie": "pixies",
    "collie": "collies",
}  # fmt: skip
_SINGULAR = {plural: singular for singular, plural in _IRREGULAR.items()} | {"mangos": "mango", "cactuses": "cactus"}
_UNCHANGED_WORDS = """
sheep fish deer moose bison shrimp squid salmon trout aircraft spacecraft scissors trousers jeans pants shorts
binoculars headphones sunglasses pyjamas pajamas tongs pliers series species dice
"""
_UNCHANGED = frozenset(_UNCHANGED_WORDS.split())
_HISSES = ("s", "x", "z", "ch", "sh")


def count_word(count: int) -> str:
    """Return the answer that says a number: a word up to ten, digits above."""
    return COUNTS[count] if count < len(COUNTS) else str(count)


def count_of(answer: str) -> int | None:
    """Return the number that an answer says, as a word or in digits; None if it says none."""
    text = answer.strip().lower()
    if text in COUNTS:
        return COUNTS.index(text)
    return int(text) if re.fullmatch("[0-9]{1,9}", text) else None


def plural(noun: str) -> str:
    """Return the plural of a noun; of a compound's last word.

    "sheep" becomes "sheeps", as GenEval 2 writes it.
    """
    head, word = _split(noun)
    if word in _IRREGULAR:
        return head + _IRREGULAR[word]
    if word in _UNCHANGED and word != "sheep":
        return head + word
    if word.endswith("man"):
        return head + word[:-3] + "men"
    if word.endswith(_HISSES):
        return head + word + "es"
    if word.endswith("y") and word[-2:-1] not in ("", *"aeiou"):
        return head + word[:-1] + "ies"
    return head + word + "s"


def singular(noun: str) -> str:
    """Return the singular of a plural noun; a word that is no plural comes back unchanged."""
    head, word = _split(noun)
    return head + _singular(word)


def _singular(word: str) -> str:
    if word in _SINGULAR:
        return _SINGULAR[word]
    if word in _UNCHANGED or word in _IRREGULAR or not word.endswith("s") or word.endswith("ss"):
        return word[:-3] + "man" if word.endswith("men") and len(word) > 4 else word
    if word.endswith("ies") and len(word) > 4:
        return word[:-3] + "y"
    if word.endswith(("sses", "xes", "ches", "shes", "zzes")):
        return word[:-2]
    return word[:-1]


def _split(noun: str) -> tuple[str, str]:
    head, space, word = noun.rpartition(" ")
    return head + space, word


def unchanged(noun: str) -> bool:
    """Whether a noun's plural can be the noun itself ("two sheep")."""
    return _split(noun)[1] in _UNCHANGED
