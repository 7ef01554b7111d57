"""Read WordNet's database files: which synset a word stands for, and how common that is.

Owns the file format. Knows nothing of wording (phrases.py) or training. Reads the directory that the Debian package
wordnet-base installs; `index.sense` is not in it, and `cntlist.rev` holds the same counts.

Source: https://wordnet.princeton.edu/documentation/wndb5wn and cntlist5wn
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

FILES = {"n": "noun", "v": "verb", "a": "adj", "r": "adv"}

_PART_OF_SENSE_TYPE = {"1": "n", "2": "v", "3": "a", "4": "r", "5": "a"}


@dataclass(frozen=True)
class Synset:
    """Hold one meaning: the words for it, its gloss, and the synsets its pointers lead to.

    `category` is the number of its lexicographer file, e.g. 6 for artifacts. Pointers are (symbol, part, offset).
    """

    part: str
    offset: int
    category: int
    words: tuple[str, ...]
    pointers: tuple[tuple[str, str, int], ...]
    gloss: str

    @cached_property
    def definition(self) -> str:
        """Give the gloss up to its quoted examples."""
        return self.gloss.split('"')[0].strip(" ;:,")

    @cached_property
    def examples(self) -> tuple[str, ...]:
        """Give the quoted examples of the gloss."""
        return tuple(text.strip() for text in re.findall(r'"([^"]*)"', self.gloss))


class WordNet:
    """Hold the four parts of speech in memory.

    `senses` maps (lower-case word, part) to synset offsets, the most frequent first; `counts` maps them to how often
    the word was met in the tagged corpora: (in its first sense, in any).
    """

    def __init__(self, directory: Path) -> None:
        self.synsets: dict[tuple[str, int], Synset] = {}
        self.senses: dict[tuple[str, str], tuple[int, ...]] = {}
        for part, name in FILES.items():
            for line in _records(directory / f"data.{name}"):
                synset = _synset(part, line)
                self.synsets[part, synset.offset] = synset
            for line in _records(directory / f"index.{name}"):
                fields = line.split()
                num_synsets = int(fields[2])
                self.senses[fields[0], part] = tuple(int(offset) for offset in fields[-num_synsets:])
        first: Counter[tuple[str, str]] = Counter()
        every: Counter[tuple[str, str]] = Counter()
        for line in _records(directory / "cntlist.rev"):
            key, number, count = line.split()
            word, _, sense = key.partition("%")
            every[word, _PART_OF_SENSE_TYPE[sense[0]]] += int(count)
            if number == "1":
                first[word, _PART_OF_SENSE_TYPE[sense[0]]] += int(count)
        self.counts = {key: (first[key], total) for key, total in every.items()}

    def first(self, word: str, part: str) -> Synset:
        """Give the most frequent meaning of a word."""
        return self.synsets[part, self.senses[word, part][0]]

    def kinds(self, synset: Synset) -> list[Synset]:
        """Give the direct hyponyms, without instances."""
        return [self.synsets[part, offset] for symbol, part, offset in synset.pointers if symbol == "~"]

    def text(self) -> Iterator[str]:
        """Yield every gloss: a corpus in which to look up how words are used."""
        for synset in self.synsets.values():
            yield synset.gloss


def _records(path: Path) -> Iterator[str]:
    """Yield the lines after the licence, whose lines begin with two spaces."""
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            if not line.startswith("  "):
                yield line.strip()


def _synset(part: str, line: str) -> Synset:
    record, _, gloss = line.partition(" | ")
    fields = record.split()
    num_words = int(fields[3], 16)
    after_words = 4 + 2 * num_words
    words = tuple(re.sub(r"\(\w+\)$", "", word).replace("_", " ") for word in fields[4:after_words:2])
    num_pointers = int(fields[after_words])
    pointers = fields[after_words + 1 : after_words + 1 + 4 * num_pointers]
    return Synset(
        part=part,
        offset=int(fields[0]),
        category=int(fields[1]),
        words=words,
        pointers=tuple(
            (pointers[at], "a" if pointers[at + 2] == "s" else pointers[at + 2], int(pointers[at + 1]))
            for at in range(0, len(pointers), 4)
        ),
        gloss=gloss.strip(),
    )
