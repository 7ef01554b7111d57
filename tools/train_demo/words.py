"""Choose the dictionary's words, and give each one definition that reads well after "is".

Owns which words there are, their articles and the trimming of glosses. Questions and answers are phrases.py's.
"""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tools.train_demo.wordnet import Synset, WordNet

_ALWAYS = (
    "anchor apple bread bridge castle clock cloud dictionary dog elephant flower forest garden gold guitar hammer "
    "happy harbor house island kitchen lamp lemon library lighthouse milk mirror moon mountain music ocean paris "
    "piano quickly river run sail salt school ship silver spoon storm tool tower tree umbrella vehicle violin water "
    "whale window winter wolf"
)
ALWAYS = frozenset(_ALWAYS.split())
"""Words, in lower case, that are in whatever their counts: the examples of the documentation and the tests use them."""

# Counts come from a small corpus of 1961: where they pick a meaning that nobody would ask for, (part, sense) is given.
_SENSES = {"bear": ("n", 0), "gold": ("n", 2), "hammer": ("n", 1), "silver": ("n", 0)}
_RARE = 2  # a count up to this orders nothing: WordNet's whale is first of all a very large person, met once

MAX_DEFINITION_CHARACTERS = 130
MAX_EXAMPLE_CHARACTERS = 80

# Numbers of WordNet's lexicographer files.
_ANIMAL, _ARTIFACT, _BODY, _FOOD, _GROUP, _PLACE, _OBJECT = 5, 6, 8, 13, 14, 15, 17
_PERSON, _PHENOMENON, _PLANT, _SHAPE, _TIME = 18, 19, 20, 25, 28
_EVERYDAY = frozenset({_ANIMAL, _ARTIFACT, _BODY, _FOOD, _OBJECT, _PERSON, _PHENOMENON, _PLANT, _SHAPE})
_COUNTED = frozenset({_ANIMAL, _ARTIFACT, _GROUP, _OBJECT, _PERSON, _PLANT, _SHAPE, _TIME})
_NAMED = frozenset(
    {_PLACE, _OBJECT, _TIME}
)  # of capitalised words only places, rivers, days and months: no people, no peoples

_FEW_USES = 4  # of a noun in the glosses, which tell nothing yet about its article

_FREQUENT_SHARE = 0.6  # of the words; the others are everyday nouns, which the tagged corpora, newspapers, hardly have

_UNFIT = re.compile(
    r"slur|offensive|obscen|vulgar|derog|disparag|insult|sexual|\bsex\b|genital|prostitut|coit|copulat|penis|vagina|"
    r"testic|expletive|deflower|subnormal|anus\b|breasts|excre|fece|urin|drug|narcotic|racial|race\b|\bJew|Negro|Black|suicid|rape|ethnic|murder|kill"
)
_FOLLOWS_NOUN = (
    r"(?=[,;.\":)]| (?:that|with|of|or|in|for|to|used|having|who|which|from|on|by|and|is|was|at|as|when|where)\b|$)"
)
_COUNTED_USE = re.compile(r"\ban? (?:[a-z]+ )?([a-z]+)" + _FOLLOWS_NOUN)
_MASS_USE = re.compile(
    r"\b(?:of|with|by|from|in|into|and|or|for|containing|some|much|as|to|is) ([a-z]+)" + _FOLLOWS_NOUN
)
_OPENING_WORDS = (
    "a an another the any some one someone something anyone anything each either every all both what whatever whoever "
    "how that his her its your two three four five several many most more half"
)
_OPENINGS = frozenset(_OPENING_WORDS.split())
_WORDS_AFTER_HEAD = (
    "of with that which who whose in on at for from by to as and or having used made related found living growing "
    "using formed usually worn covered native bearing extending located similar resembling containing consisting "
    "between without where when than characterized produced caused given into not but so such like about"
)
_AFTER_HEAD = frozenset(_WORDS_AFTER_HEAD.split())


@dataclass(frozen=True)
class Entry:
    """Hold what the dictionary knows of a word.

    `article` is `a`, `an` or nothing; `plural` words are followed by "are". `kinds` are words for the direct hyponyms.
    """

    word: str
    part: str
    definition: str
    article: str = ""
    plural: bool = False
    synonyms: tuple[str, ...] = ()
    example: str = ""
    kinds: tuple[str, ...] = ()

    @property
    def named(self) -> str:
        """Give the word as a sentence names it: a lighthouse, water, to run, happy."""
        if self.part == "v":
            return f"to {self.word}"
        return f"{self.article} {self.word}".lstrip()


class Usage:
    """Tell from a corpus whether a noun takes an article, and how common words are."""

    def __init__(self, corpus: Iterable[str]) -> None:
        self._counted: Counter[str] = Counter()
        self._mass: Counter[str] = Counter()
        self.frequency: Counter[str] = Counter()
        for text in corpus:
            self._counted.update(_COUNTED_USE.findall(text))
            self._mass.update(_MASS_USE.findall(text))
            self.frequency.update(set(re.findall(r"[a-z]+", text)))

    def is_counted(self, noun: str, category: int, default: bool) -> bool:
        """Tell whether one says "a `noun`"; `default` if the corpus hardly shows it with an article or without."""
        counted, mass = self._counted[noun], self._mass[noun]
        if category in (_ANIMAL, _PERSON) or (not counted and mass < _FEW_USES):
            return default
        return counted > (0.15 if category == _BODY else 0.4) * mass


def article(word: str) -> str:
    """Give the indefinite article by sound, as far as spelling tells it."""
    if re.match(r"(?:hour|honest|honou?r|heir)", word, re.IGNORECASE):
        return "an"
    if re.match(r"(?:uni(?![nmd])|us[aeu]|uten|ut[io]|ub|eu|ewe|one\b|once|uku|ura|uri)", word, re.IGNORECASE):
        return "a"
    return "an" if word[0].lower() in "aeiou" else "a"


def choose(wordnet: WordNet, num_words: int) -> list[Entry]:
    """Choose up to `num_words` words, in alphabetical order.

    First the most frequent ones, each in the part of speech whose first sense is the most frequent, then everyday
    nouns by how many glosses use them.
    """
    usage = Usage(wordnet.text())
    frequent = sorted(_best_parts(wordnet), key=lambda key: (-wordnet.counts.get(key, (0, 0))[1], key))
    everyday = sorted(
        (key for key in frequent if wordnet.first(*key).category in _EVERYDAY and key[1] == "n"),
        key=lambda key: (-usage.frequency[key[0]], len(key[0]), key),
    )
    entries: dict[str, Entry] = {}

    def add(keys: Iterable[tuple[str, str]], limit: int) -> None:
        for key in keys:
            if len(entries) >= limit:
                return
            entry = None if key[0] in entries else _entry(wordnet, usage, *key)
            if entry is not None:
                entries[key[0]] = entry

    add((key for key in frequent if key[0] in ALWAYS), num_words)
    add(frequent, int(num_words * _FREQUENT_SHARE))
    add(everyday, num_words)
    return sorted(entries.values(), key=lambda entry: (entry.word.lower(), entry.word))


def _best_parts(wordnet: WordNet) -> Iterator[tuple[str, str]]:
    """Yield each word with the part of speech that it has most often, nouns first where counts tie."""
    best: dict[str, str] = {}
    for word, part in wordnet.senses:  # in the order n, v, a, r
        if re.fullmatch(r"[a-z]{3,14}", word):
            count = wordnet.counts.get((word, part), (0, 0))[0]
            if word not in best or count > max(_RARE, wordnet.counts.get((word, best[word]), (0, 0))[0]):
                best[word] = part
    for word, part in best.items():
        yield word, _SENSES.get(word, (part,))[0]


def _meaning(wordnet: WordNet, word: str, part: str) -> Synset:
    """Give the most frequent meaning; where counts are too low to tell, an animal, or else no namesake."""
    senses = [wordnet.synsets[part, offset] for offset in wordnet.senses[word, part]]
    if word in _SENSES:
        return senses[min(_SENSES[word][1], len(senses) - 1)]
    if part == "n" and wordnet.counts.get((word, part), (0, 0))[0] <= _RARE:
        common = [synset for synset in senses if word in synset.words]
        animals = [synset for synset in common if synset.category == _ANIMAL]
        return (animals or common or senses)[0]
    return senses[0]


def _entry(wordnet: WordNet, usage: Usage, word: str, part: str) -> Entry | None:
    """Make the entry of a word; None for one that a small dictionary for everybody leaves out."""
    synset = _meaning(wordnet, word, part)
    spelt = min((name for name in synset.words if name.lower() == word), key=str.swapcase)  # lower case, if there is
    definition = trim(synset.definition)
    if not definition or _UNFIT.search(synset.gloss) or word in definition.lower().split()[:4]:
        return None
    is_name = spelt != word
    if is_name and (not spelt.istitle() or synset.category not in _NAMED):
        return None
    if part == "n":
        definition = _with_article(wordnet, usage, definition)
    opens = definition.split()[0] in {"a", "an", "any", "one", "someone"}
    plural = part == "n" and not is_name and _is_plural(wordnet, word)
    default = synset.category in (_ANIMAL, _PERSON) or (opens and synset.category in _COUNTED | {_BODY})
    counted = part == "n" and not is_name and usage.is_counted(word, synset.category, default and not plural)
    return Entry(
        word=spelt,
        part=part,
        definition=definition,
        article=article(spelt) if counted else "",
        plural=plural and not counted,
        synonyms=tuple(name for name in synset.words if name.lower() != word and re.fullmatch(r"[a-z ]+", name))[:3],
        example=_example(synset, word),
        kinds=tuple(_kinds(wordnet, usage, synset, word)),
    )


def trim(definition: str) -> str:
    """Shorten a gloss to its first clause without parentheses; empty if it stays too long or says nothing."""
    text = re.sub(r"\([^()]*\)", " ", definition).replace("`", "'")
    text = re.sub(r"\s+([,;:.])", r"\1", re.sub(r"\s+", " ", text)).partition(", including:")[0].strip(" ,;:.")
    first, _, rest = text.partition("; ")
    if len(first) < 12 and rest:
        first = f"{first}; {rest.partition('; ')[0]}"
    first = first.strip(" ,;:.")
    fits = 6 <= len(first) <= MAX_DEFINITION_CHARACTERS and not re.search(r"[()\"`]", first)
    return first if fits and first.isascii() else ""


def _with_article(wordnet: WordNet, usage: Usage, definition: str) -> str:
    """Put an article before a definition whose head is a counted noun: many glosses leave it out."""
    tokens = definition.split()
    if tokens[0].lower() in _OPENINGS or tokens[0].endswith("'s"):
        return definition
    head = ""
    for token in tokens:
        bare = token.strip(",;:")
        if bare in _AFTER_HEAD:
            break
        head = bare
        if bare != token and (bare, "n") in wordnet.senses:
            break
    if (head, "n") not in wordnet.senses or (head.endswith("s") and not head.endswith("ss")):
        return definition
    category = wordnet.first(head, "n").category
    counted = usage.is_counted(head, category, category in _COUNTED)
    return f"{article(definition)} {definition}" if counted else definition


def _is_plural(wordnet: WordNet, word: str) -> bool:
    ends = word.endswith("s") and not word.endswith(("ss", "us", "is", "ics"))
    return ends and any((word[:-1], part) in wordnet.senses for part in "nv")


def _example(synset: Synset, word: str) -> str:
    """Give the first example that uses the word, as a sentence."""
    for text in synset.examples:
        fits = len(text) <= MAX_EXAMPLE_CHARACTERS and text.isascii() and re.search(rf"\b{word}", text, re.IGNORECASE)
        if fits and len(text.split()) >= 3 and not re.search(r"[()`]", text):
            return text[0].upper() + text[1:].rstrip(" .;,") + ("" if text[-1] in "?!" else ".")
    return ""


def _kinds(wordnet: WordNet, usage: Usage, synset: Synset, word: str) -> list[str]:
    """Give the three best-known kinds of a thing, or none."""
    if synset.part != "n":
        return []
    names = set()
    for kind in wordnet.kinds(synset):
        name = kind.words[0]
        known = re.fullmatch(r"[a-z]+(?: [a-z]+)?", name) and wordnet.first(name.replace(" ", "_"), "n") is kind
        if known and name != word and not _UNFIT.search(kind.gloss):
            names.add(name)
    best = sorted(names, key=lambda name: (-usage.frequency[name], len(name), name))[:3]
    return best if len(best) == 3 else []
