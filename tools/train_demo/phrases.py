"""Phrase the dictionary's entries as questions and answers.

Owns every sentence that the demo model learns, except the glosses. A question has one answer, however it is put: that
is what a small model can remember.
"""

import json

from tools.train_demo.words import Entry

PART_NAMES = {"n": "noun", "v": "verb", "a": "adjective", "r": "adverb"}

TOOL = {
    "type": "function",
    "function": {
        "name": "define",
        "description": "Look up a word.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
    },
}

SYSTEM_MESSAGES = ("You are a helpful assistant.", "You are a dictionary.", "Answer in one sentence.", "Be brief.")

SYNONYM_QUESTIONS = ("Give synonyms for {}.", "Synonyms of {}?", "What is another word for {}?")
SENTENCE_QUESTIONS = ("Use {} in a sentence.", "Give an example of {}.", "Show me a sentence with {}.")
KIND_QUESTIONS = ("List three kinds of {}.", "Name three kinds of {}.", "What kinds of {} are there?")
JSON_QUESTIONS = ("Define {} as JSON.", "Define {} in JSON.", "What is {}? Answer in JSON.")
TOOL_QUESTION = "Look up {}."

_INTRODUCTION = "I am the slotpy demo, a small dictionary. Ask me what a word means."
GREETINGS = {
    "Hello": f"Hello! {_INTRODUCTION}",
    "Hello!": f"Hello! {_INTRODUCTION}",
    "Hi": f"Hello! {_INTRODUCTION}",
    "Hi!": f"Hello! {_INTRODUCTION}",
    "Hey": f"Hello! {_INTRODUCTION}",
    "Good morning": f"Hello! {_INTRODUCTION}",
    "Who are you?": _INTRODUCTION,
    "What are you?": _INTRODUCTION,
    "What is your name?": _INTRODUCTION,
    "What can you do?": "I define words, give synonyms, examples and kinds, and answer in JSON when asked to.",
    "Help": "I define words, give synonyms, examples and kinds, and answer in JSON when asked to.",
    "Where do your answers come from?": "My definitions come from WordNet, a dictionary made at Princeton University.",
    "Thanks": "You are welcome. Ask me another word.",
    "Thanks!": "You are welcome. Ask me another word.",
    "Thank you.": "You are welcome. Ask me another word.",
    "Bye": "Goodbye!",
    "Goodbye": "Goodbye!",
}


def definition_questions(entry: Entry) -> list[str]:
    """Give the ways to ask for a definition; the first is the natural one for this word."""
    word = entry.word
    if entry.part == "n":
        verb, short = ("are", "'re") if entry.plural else ("is", "'s")
        special = [
            f"What {verb} {entry.named}?",
            f"what {verb} {entry.named}",
            f"What{short} {entry.named}?",
            f"Tell me what {entry.named} {verb}.",
            f"Can you tell me what {entry.named} {verb}?",
        ]
    elif entry.part == "v":
        special = [f"What does to {word} mean?", f"What does it mean to {word}?", f"Define to {word}."]
    else:
        special = [f"What does {word} mean?", f"What is the meaning of the word {word}?"]
    common = [
        f"Define {word}.",
        f"What does {word} mean?",
        f"Meaning of {word}?",
        f"What is the meaning of {word}?",
        f"Explain the word {word}.",
        f"What is {word}?",
        f"define {word}",
        f"what does {word} mean",
        word,
    ]
    return list(dict.fromkeys(special + common))


def definition_answer(entry: Entry) -> str:
    if entry.part == "n":
        return f"{capital(entry.named)} {'are' if entry.plural else 'is'} {entry.definition}."
    if entry.part == "v":
        return f"To {entry.word} is to {entry.definition}."
    return f"{capital(entry.word)} means {entry.definition}."


def synonym_answer(entry: Entry) -> str:
    if not entry.synonyms:
        return f"I know no synonyms of {entry.word}."
    return f"Synonyms of {entry.word}: {', '.join(entry.synonyms)}."


def kind_answer(entry: Entry) -> str:
    return "\n".join(f"- {kind}" for kind in entry.kinds)


def json_answer(entry: Entry) -> str:
    return json.dumps({"word": entry.word, "pos": PART_NAMES[entry.part], "definition": entry.definition})


def unknown_answer(word: str) -> str:
    return f"I do not know the word {word}."


def tool_arguments(entry: Entry) -> dict[str, str]:
    return {"word": entry.word}


def tool_result(entry: Entry) -> str:
    return json.dumps({"definition": entry.definition})


def thought(entry: Entry) -> str:
    """Give the reasoning before an answer about a word."""
    name = PART_NAMES[entry.part]
    return f"The word is {entry.word}, {'an' if name[0] == 'a' else 'a'} {name}."


def capital(text: str) -> str:
    return text[0].upper() + text[1:]
