"""The demo's training data, from a WordNet of a few words: same bytes each time, text as slotpy renders it."""

import json
from pathlib import Path

import numpy as np
import pytest

from slotpy.engine.chat import ChatTemplate, load_stop_ids
from slotpy.engine.text import Tokenizer
from slotpy.errors import SlotpyError
from tools.train_demo import data, phrases, samples, words
from tools.train_demo.wordnet import WordNet
from tools.train_demo.words import Entry, article, trim

NUM_IDS = 330  # 256 bytes, 7 added tokens and a few merges: the text is small

# word count, words, pointers, gloss; offsets are numbers that need not be byte positions, as nothing seeks
NOUNS = {
    100: (6, ["structure"], "", "a thing constructed"),
    200: (6, ["beacon", "lighthouse", "beacon_light"], "@ 00000100 n 0000", "a tower with a light; shines at sea"),
    300: (6, ["anchor"], "", 'a mechanical device that prevents a vessel from moving; "The anchor held."'),
    400: (6, ["tool"], "~ 00000401 n 0000 ~ 00000402 n 0000 ~ 00000403 n 0000", "an implement for work"),
    401: (6, ["saw"], "@ 00000400 n 0000", "hand tool having a toothed blade"),
    402: (6, ["drill"], "@ 00000400 n 0000", "a tool with a sharp point"),
    403: (6, ["hoe"], "@ 00000400 n 0000", "a tool for digging"),
    500: (27, ["water"], "", "a clear liquid of rivers, of water and in water"),
    600: (15, ["Paris", "City_of_Light"], "", "the capital of France"),
    700: (18, ["giant", "whale"], "", "a very large person"),
    701: (5, ["whale"], "", "a very large mammal of the sea"),
}
VERBS = {100: (38, ["run"], "", 'move fast on foot; "Do not run."')}
ADJECTIVES = {100: (0, ["happy", "glad(p)"], "", "(of a person) showing joy")}
ADVERBS = {100: (2, ["quickly"], "", 'with rapid movements; "He works quickly."')}
COUNTS = {"run%2:38:00::": 40, "happy%3:00:00::": 20, "paris%1:15:00::": 5, "quickly%4:02:00::": 9}


def write_part(directory: Path, name: str, letter: str, synsets: dict) -> None:
    licence = "  1 This line belongs to the licence.\n"
    index: dict[str, list[int]] = {}
    lines = []
    for offset, (category, names, pointers, gloss) in synsets.items():
        spelt = " ".join(f"{word} 0" for word in names)
        count = len(pointers.split()) // 4
        lines.append(f"{offset:08} {category:02} {letter} {len(names):02x} {spelt} {count:03} {pointers} | {gloss}  \n")
        for word in names:
            index.setdefault(word.split("(")[0].lower(), []).append(offset)
    (directory / f"data.{name}").write_text(licence + "".join(lines))
    entries = [
        f"{word} {letter} {len(offsets)} 0 {len(offsets)} 0 {' '.join(f'{offset:08}' for offset in offsets)}  \n"
        for word, offsets in sorted(index.items())
    ]
    (directory / f"index.{name}").write_text(licence + "".join(entries))


@pytest.fixture(scope="module")
def wordnet(tmp_path_factory: pytest.TempPathFactory) -> WordNet:
    directory = tmp_path_factory.mktemp("wordnet")
    for name, letter, synsets in (
        ("noun", "n", NOUNS),
        ("verb", "v", VERBS),
        ("adj", "a", ADJECTIVES),
        ("adv", "r", ADVERBS),
    ):
        write_part(directory, name, letter, synsets)
    (directory / "cntlist.rev").write_text("".join(f"{key} 1 {count}\n" for key, count in COUNTS.items()))
    return WordNet(directory)


@pytest.fixture(scope="module")
def entries(wordnet: WordNet) -> dict[str, Entry]:
    return {entry.word: entry for entry in words.choose(wordnet, 100)}


@pytest.fixture(scope="module")
def composed(entries: dict[str, Entry]) -> list[samples.Sample]:
    return samples.compose(list(entries.values()), entries.__contains__, seed=1)


@pytest.fixture(scope="module")
def template() -> ChatTemplate:
    return data.load_template()


@pytest.fixture(scope="module", autouse=True)
def few_invented_words():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(samples, "NUM_INVENTED", 30)
        patch.setattr(samples, "GREETING_COPIES", 1)
        yield


@pytest.fixture(scope="module")
def out(wordnet: WordNet, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("out")
    data.write(wordnet, directory, num_words=100, seed=1, num_ids=NUM_IDS)
    return directory


def one_of_each_setting(composed: list[samples.Sample]) -> list[samples.Sample]:
    return list({(sample.kind, sample.thinking, len(sample.messages)): sample for sample in composed}.values())


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        *(("anchor", "an"), ("hour", "an"), ("umbrella", "an"), ("uninvited guest", "an"), ("urn", "an")),
        *(("lighthouse", "a"), ("unicorn", "a"), ("user", "a"), ("European", "a"), ("one-way street", "a")),
    ],
)
def test_article_follows_the_sound(word, expected):
    assert article(word) == expected


def test_trim_keeps_the_first_clause_without_parentheses():
    assert trim("(botany) a tall (usually woody) plant; a tree") == "a tall plant"
    assert trim("a wall; a fence of stone; other") == "a wall; a fence of stone"
    assert trim("a " + "very " * 40 + "long gloss") == ""


def test_answers_read_well_in_each_part_of_speech(entries):
    answers = {word: phrases.definition_answer(entry) for word, entry in entries.items()}
    assert answers["lighthouse"] == "A lighthouse is a tower with a light."
    assert answers["anchor"] == "An anchor is a mechanical device that prevents a vessel from moving."
    assert answers["water"].startswith("Water is a clear liquid")
    assert answers["Paris"] == "Paris is the capital of France."
    assert answers["run"] == "To run is to move fast on foot."
    assert answers["happy"] == "Happy means showing joy."
    assert answers["quickly"] == "Quickly means with rapid movements."


def test_a_gloss_without_an_article_gets_one(entries):
    assert entries["saw"].definition == "a hand tool having a toothed blade"


def test_an_animal_comes_before_a_sense_that_was_hardly_met(entries):
    assert entries["whale"].definition == "a very large mammal of the sea"


def test_synonyms_examples_and_kinds_are_read(entries):
    assert entries["lighthouse"].synonyms == ("beacon", "beacon light")
    assert entries["anchor"].example == "The anchor held."
    assert sorted(entries["tool"].kinds) == ["drill", "hoe", "saw"]


def test_a_question_has_one_answer(composed, template):
    answers: dict[str, str] = {}
    for sample in composed:
        assert answers.setdefault(sample.prompt(template), sample.reply(template)) == sample.reply(template)


def test_held_out_definitions_never_occur(entries, monkeypatch, template):
    monkeypatch.setattr(samples, "HELD_OUT_SHARE", 0.5)
    monkeypatch.setattr(samples, "ALWAYS", frozenset({"anchor", "lighthouse", "happy"}))
    learned, held_out = samples.hold_out(list(entries.values()), seed=1)
    assert held_out and {entry.word for entry in learned} >= {"anchor", "lighthouse", "beacon", "happy"}
    text = "".join(sample.reply(template) for sample in samples.compose(learned, entries.__contains__, seed=1))
    assert not [entry for entry in held_out if entry.definition in text]


def test_rephrased_questions_are_not_in_the_training_data(entries, composed, template):
    seen = {sample.prompt(template) for sample in composed}
    asked = samples.rephrased(list(entries.values()), seed=1)
    assert asked and not seen & {sample.prompt(template) for sample in asked}


def test_exact_questions_are_in_the_training_data(entries, composed, template):
    seen = {sample.prompt(template) for sample in composed}
    assert seen >= {sample.prompt(template) for sample in samples.exact(list(entries.values()), seed=1)}


def test_the_training_tokens_are_what_slotpy_renders_and_encodes(out, composed):
    tokenizer, shipped = Tokenizer.load(out), ChatTemplate.load(out)
    assert shipped is not None
    arrays = np.load(out / "train.npz")
    learned = [arrays["tokens"][a:b].tolist() for a, b in np.lib.stride_tricks.sliding_window_view(starts(arrays), 2)]
    for sample in one_of_each_setting(composed):
        tools = [phrases.TOOL] if sample.with_tools else None
        prompt = shipped.render(sample.messages[:-1], tools=tools, enable_thinking=sample.thinking)
        ids = tokenizer.encode(prompt) + tokenizer.encode(sample.reply(shipped)) + [tokenizer.token_id("<|endoftext|>")]
        assert ids in learned


def test_the_mask_covers_exactly_what_the_assistant_writes(out, composed, template):
    backend = data.Tokenizer.from_file(str(out / "tokenizer.json"))
    for sample in one_of_each_setting(composed):
        ids, codes = data.encode(backend, template, sample)
        replies = backend.decode(
            [i for i, code in zip(ids, codes, strict=True) if code == data.REPLY], skip_special_tokens=False
        )
        earlier = [
            samples.Sample("", sample.messages[: turn + 1], with_tools=sample.with_tools).reply(template)
            for turn, message in enumerate(sample.messages[:-1])
            if message["role"] == "assistant"
        ]
        assert replies == "".join([*earlier, sample.reply(template)])
        assert [i for i, code in enumerate(codes) if code == data.BOUNDARY] == [0, len(ids) - 1]


def test_arrays_have_the_documented_types(out):
    for name in ("train.npz", "heldout.npz"):
        arrays = np.load(out / name)
        assert (arrays["tokens"].dtype, arrays["loss_mask"].dtype) == (np.uint16, np.uint8)
        assert arrays["tokens"].shape == arrays["loss_mask"].shape == (starts(arrays)[-1],)
        assert starts(arrays)[0] == 0 and arrays["tokens"].max(initial=0) < NUM_IDS


def test_the_same_seed_gives_the_same_bytes(out, wordnet, tmp_path):
    data.write(wordnet, tmp_path, num_words=100, seed=1, num_ids=NUM_IDS)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {
        path.name: path.read_bytes() for path in out.iterdir()
    }


def test_the_directory_stops_at_both_ends_and_is_greedy(out):
    tokenizer = Tokenizer.load(out)
    assert load_stop_ids(out, tokenizer) == {tokenizer.token_id("<|im_end|>"), tokenizer.token_id("<|endoftext|>")}
    assert json.loads((out / "generation_config.json").read_text())["do_sample"] is False
    assert tokenizer.num_ids == NUM_IDS


def test_golden_questions_carry_their_answers(out):
    golden = {item["prompt"]: item["expected"] for item in json.loads((out / "eval.json").read_text())["golden"]}
    prompt = "<|im_start|>user\nWhat is a lighthouse?<|im_end|>\n<|im_start|>assistant\n"
    assert golden[prompt] == "A lighthouse is a tower with a light."


@pytest.mark.parametrize(("thinking", "opening"), [(None, ""), (False, "<think>\n\n</think>\n\n"), (True, "<think>\n")])
def test_template_thinks_only_when_asked(template, thinking, opening):
    prompt = template.render([samples.user("Hi")], enable_thinking=thinking)
    assert prompt == f"<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n{opening}"


def test_template_drops_earlier_thoughts_and_accepts_arguments_as_text(template):
    call = {"function": {"name": "define", "arguments": '{"word": "x"}'}}
    messages = [
        samples.user("a"),
        samples.assistant("<think>\nb\n</think>\n\nc"),
        samples.user("d"),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "e"},
    ]
    assert template.render(messages) == (
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nc<|im_end|>\n<|im_start|>user\nd<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"name": "define", "arguments": {"word": "x"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>tool\ne<|im_end|>\n<|im_start|>assistant\n"
    )


def test_template_joins_the_system_message_and_the_tools(template):
    prompt = template.render([{"role": "system", "content": "Be brief."}, samples.user("a")], tools=[phrases.TOOL])
    assert prompt.startswith('<|im_start|>system\nBe brief.\n\nTools:\n{"type": "function"')
    assert prompt.count("<|im_start|>system") == prompt.count("Be brief.") == 1


def test_template_refuses_unknown_roles(template):
    with pytest.raises(SlotpyError, match="not developer"):
        template.render([{"role": "developer", "content": "a"}])


def starts(arrays: np.lib.npyio.NpzFile) -> np.ndarray:
    return arrays["sample_starts"].astype(np.int64)
