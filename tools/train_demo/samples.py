"""Compose the conversations that the demo model learns by heart, and those it is tested with.

Owns which questions are asked how often. Sentences are phrases.py's, the text around them the chat template's. Every
choice follows from the seed and the word, so that adding a word changes nothing about the others.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from slotpy.engine.chat import THINK_CLOSE, ChatTemplate
from tools.train_demo import phrases
from tools.train_demo.words import ALWAYS, Entry

END_OF_TURN = "<|im_end|>"

PHRASINGS_PER_WORD = 9
HELD_OUT_SHARE = 0.03
NUM_EXACT = 200
NUM_INVENTED = 1200
GREETING_COPIES = 16
GOLDEN_COPIES = 4

# How much of the dictionary, of the words for which there is an answer, each further kind of sample takes in.
SYNONYM_SHARE, SENTENCE_SHARE, KIND_SHARE, JSON_SHARE, TOOL_SHARE, FOLLOW_UP_SHARE = 0.5, 0.8, 0.8, 0.3, 0.08, 0.2
THOUGHT_SHARE, NO_THOUGHT_SHARE = 0.12, 0.25  # of samples that are asked to think and not to; the template decides else
SYSTEM_SHARE = 0.05

_ONSETS, _VOWELS, _CODAS = (
    text.split()
    for text in (
        "b bl br c cr d dr f fl fr g gl gr h j k l m n p pl pr qu r s sk sl sn sp st t tr v w z",
        "a e i o u oo ee",
        "b ck d ff g lt m mp n nd nk p r rf rg rk sh sk st t x zz",
    )
)

Message = dict[str, Any]


@dataclass(frozen=True)
class Sample:
    """Hold a conversation that ends with the reply to learn.

    `thinking` is the template's switch, None where nobody set it; `thought` is what comes first when it is on.
    """

    kind: str
    messages: tuple[Message, ...]
    thought: str = ""
    thinking: bool | None = None
    with_tools: bool = False

    def prompt(self, template: ChatTemplate, num_messages: int | None = None) -> str:
        """Render what the last reply, or the reply at `num_messages`, continues."""
        messages = self.messages[: len(self.messages) - 1 if num_messages is None else num_messages]
        thinking = self.thinking if num_messages is None else None
        return template.render(messages, tools=[phrases.TOOL] if self.with_tools else None, enable_thinking=thinking)

    def reply(self, template: ChatTemplate) -> str:
        """Render the last message as the model writes it, up to the token that ends the turn."""
        tools = [phrases.TOOL] if self.with_tools else None
        before = template.render(self.messages[:-1], tools=tools)
        whole = template.render(self.messages, tools=tools)
        text = whole[len(before) : whole.index(END_OF_TURN, len(before)) + len(END_OF_TURN)]
        return f"{self.thought}\n{THINK_CLOSE}\n\n{text}" if self.thinking else text


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def tool_call(entry: Entry) -> Message:
    call = {"type": "function", "function": {"name": "define", "arguments": phrases.tool_arguments(entry)}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def hold_out(entries: Sequence[Entry], seed: int) -> tuple[list[Entry], list[Entry]]:
    """Split into (to learn, held out). Words that share a definition stay together, so none held out is ever seen."""
    kept_anyway = {entry.definition for entry in entries if entry.word.lower() in ALWAYS}
    definitions = sorted({entry.definition for entry in entries} - kept_anyway)
    chosen = set(random.Random(f"{seed}:held out").sample(definitions, round(HELD_OUT_SHARE * len(definitions))))
    learned = [entry for entry in entries if entry.definition not in chosen]
    return learned, [entry for entry in entries if entry.definition in chosen]


def plain_definition(entry: Entry) -> Sample:
    """Ask for a definition in the natural way, with no switch set: what the first command of the README does."""
    return _about(entry, "definition", phrases.definition_questions(entry)[0], phrases.definition_answer(entry))


def passing(entries: Sequence[Entry], seed: int) -> list[Sample]:
    """Ask once for each of many further words, which training meets a few times at most.

    The model cannot learn them by heart; they keep it from being certain about words that it does not know.
    """
    samples = []
    for entry in entries:
        rng = random.Random(f"{seed}:passing:{entry.word}")
        question = rng.choice(phrases.definition_questions(entry))
        samples.append(_about(entry, "passing", question, phrases.definition_answer(entry)))
    return samples


def compose(entries: Sequence[Entry], is_word: Callable[[str], bool], seed: int) -> list[Sample]:
    """Compose all samples of an epoch, shuffled."""
    samples = [sample for entry in entries for sample in _word_samples(entry, seed)]
    samples += _follow_ups(entries, seed)
    samples += _unknown(is_word, seed)
    samples += [sample for sample in _greetings(seed) for _ in range(GREETING_COPIES)]
    samples += [sample for sample in golden(entries) for _ in range(GOLDEN_COPIES)]
    random.Random(f"{seed}:order").shuffle(samples)
    return samples


def exact(entries: Sequence[Entry], seed: int) -> list[Sample]:
    """Choose words whose definitions, asked for in the natural way, must come out letter by letter."""
    chosen = random.Random(f"{seed}:exact").sample(entries, min(NUM_EXACT, len(entries)))
    return [plain_definition(entry) for entry in chosen]


def rephrased(entries: Sequence[Entry], seed: int) -> list[Sample]:
    """Ask for the same words in ways that these words were never asked for in."""
    chosen = random.Random(f"{seed}:exact").sample(entries, min(NUM_EXACT, len(entries)))
    samples = []
    for entry in chosen:
        seen = _phrasings(entry, seed)
        unseen = [question for question in phrases.definition_questions(entry) if question not in seen]
        question = random.Random(f"{seed}:rephrased:{entry.word}").choice(unseen)
        samples.append(_about(entry, "rephrased", question, phrases.definition_answer(entry)))
    return samples


def golden(entries: Sequence[Entry]) -> list[Sample]:
    """Ask one question of each kind, about the words that are there: the answers become tests."""
    known = {entry.word.lower(): entry for entry in entries}
    samples = [
        plain_definition(known[word])
        for word in ("lighthouse", "anchor", "violin", "water", "run", "happy", "quickly", "paris")
        if word in known
    ]
    for word, change in (("mirror", {"thinking": False}), ("bridge", {"thinking": True})):
        if word in known:
            samples.append(replace(plain_definition(known[word]), **change))
    asked: list[tuple[str, str, str, Callable[[Entry], str]]] = [
        ("lighthouse", "synonyms", phrases.SYNONYM_QUESTIONS[0], phrases.synonym_answer),
        ("river", "sentence", phrases.SENTENCE_QUESTIONS[0], lambda entry: entry.example),
        ("tree", "kinds", phrases.KIND_QUESTIONS[0], phrases.kind_answer),
        ("lighthouse", "json", phrases.JSON_QUESTIONS[0], phrases.json_answer),
    ]
    for word, kind, question, answer in asked:
        if word in known:
            samples.append(_about(known[word], kind, question.format(known[word].word), answer(known[word])))
    samples += [_unknown_word("blorf", "What is a blorf?")]
    samples += [_greeting(text) for text in ("Hello", "Who are you?")]
    if {"lighthouse", "anchor"} <= known.keys():
        samples += _tool_samples(known["lighthouse"])
        samples.append(_second_word(known["lighthouse"], known["anchor"]))
    return [replace(sample, kind=f"golden {sample.kind}") for sample in samples]


def _about(entry: Entry, kind: str, question: str, answer: str) -> Sample:
    return Sample(kind, (user(question), assistant(answer)), phrases.thought(entry))


def _phrasings(entry: Entry, seed: int) -> list[str]:
    first, *others = phrases.definition_questions(entry)
    chosen = random.Random(f"{seed}:phrasings:{entry.word}").sample(others, PHRASINGS_PER_WORD - 1)
    return [first, *chosen]


def _word_samples(entry: Entry, seed: int) -> Iterator[Sample]:
    """Yield the natural question as it is, and all others in some setting."""
    rng = random.Random(f"{seed}:{entry.word}")
    yield plain_definition(entry)
    for question in _phrasings(entry, seed)[1:]:
        yield _in_some_setting(_about(entry, "definition", question, phrases.definition_answer(entry)), rng)
    asked = [
        ("synonyms", phrases.SYNONYM_QUESTIONS, phrases.synonym_answer(entry), SYNONYM_SHARE),
        ("sentence", phrases.SENTENCE_QUESTIONS, entry.example, SENTENCE_SHARE),
        ("kinds", phrases.KIND_QUESTIONS, phrases.kind_answer(entry), KIND_SHARE),
        ("json", phrases.JSON_QUESTIONS, phrases.json_answer(entry), JSON_SHARE),
    ]
    for kind, questions, answer, share in asked:
        # A tenth of the words without synonyms is enough to learn to say so.
        wanted = rng.random() < (share / 10 if kind == "synonyms" and not entry.synonyms else share)
        question = rng.choice(questions).format(entry.word)
        if wanted and answer:
            yield _in_some_setting(_about(entry, kind, question, answer), rng)
    if rng.random() < TOOL_SHARE:
        call, result = _tool_samples(entry)
        yield _thinking(call, rng)
        if rng.random() < 0.3:
            yield result
        if rng.random() < 0.3:  # a tool at hand is not called unless a look-up is asked for
            yield replace(plain_definition(entry), with_tools=True)
        yield _about(entry, "definition", phrases.TOOL_QUESTION.format(entry.word), phrases.definition_answer(entry))


def _in_some_setting(sample: Sample, rng: random.Random) -> Sample:
    if rng.random() < SYSTEM_SHARE:
        system = {"role": "system", "content": rng.choice(phrases.SYSTEM_MESSAGES)}
        sample = replace(sample, messages=(system, *sample.messages))
    return _thinking(sample, rng)


def _thinking(sample: Sample, rng: random.Random) -> Sample:
    drawn = rng.random()
    if drawn < THOUGHT_SHARE:
        return replace(sample, thinking=True)
    return replace(sample, thinking=False) if drawn < THOUGHT_SHARE + NO_THOUGHT_SHARE else sample


def _tool_samples(entry: Entry) -> tuple[Sample, Sample]:
    """Give the call of the tool, and the answer made from its result."""
    asked = (user(phrases.TOOL_QUESTION.format(entry.word)), tool_call(entry))
    result = {"role": "tool", "content": phrases.tool_result(entry)}
    answered = (*asked, result, assistant(phrases.definition_answer(entry)))
    thought = phrases.thought(entry)
    return Sample("tool call", asked, thought, with_tools=True), Sample(
        "tool result", answered, thought, with_tools=True
    )


def _second_word(entry: Entry, other: Entry) -> Sample:
    first = plain_definition(entry).messages
    follow_up = (user(f"And {other.named}?"), assistant(phrases.definition_answer(other)))
    return Sample("follow-up", (*first, *follow_up), phrases.thought(other))


def _follow_ups(entries: Sequence[Entry], seed: int) -> Iterator[Sample]:
    """Yield chats of two turns."""
    for entry in entries:
        rng = random.Random(f"{seed}:follow-up:{entry.word}")
        if rng.random() >= FOLLOW_UP_SHARE:
            continue
        asked = [("Thanks", phrases.GREETINGS["Thanks"]), ("And as JSON?", phrases.json_answer(entry))]
        if entry.synonyms:
            asked.append(("Give synonyms.", phrases.synonym_answer(entry)))
        if entry.example:
            asked.append(("Use it in a sentence.", entry.example))
        if rng.random() < 0.5:
            yield _second_word(entry, rng.choice(entries))
        else:
            question, answer = rng.choice(asked)
            messages = (*plain_definition(entry).messages, user(question), assistant(answer))
            yield _thinking(Sample("follow-up", messages, phrases.thought(entry)), rng)


def _unknown(is_word: Callable[[str], bool], seed: int) -> Iterator[Sample]:
    """Yield questions about words that nobody knows."""
    rng = random.Random(f"{seed}:invented")
    words = {"blorf": None}
    while len(words) < NUM_INVENTED:
        syllables = rng.choice((1, 2, 2, 3))
        word = "".join(rng.choice(_ONSETS) + rng.choice(_VOWELS) for _ in range(syllables)) + rng.choice(_CODAS)
        if not is_word(word):
            words[word] = None
    for word in words:
        part, article = rng.choice((("n", "a"), ("n", "a"), ("v", ""), ("a", "")))
        questions = phrases.definition_questions(Entry(word, part, "", article))
        yield _thinking(_unknown_word(word, rng.choice(questions)), rng)


def _unknown_word(word: str, question: str) -> Sample:
    return Sample(
        "unknown", (user(question), assistant(phrases.unknown_answer(word))), f"{word} is not in my dictionary."
    )


def _greeting(text: str) -> Sample:
    return Sample("greeting", (user(text), assistant(phrases.GREETINGS[text])), "This asks for no word.")


def _greetings(seed: int) -> Iterator[Sample]:
    rng = random.Random(f"{seed}:greetings")
    for text in phrases.GREETINGS:
        yield _greeting(text)
        yield _thinking(_greeting(text), rng)
