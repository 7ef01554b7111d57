"""Write the demo model's training data: `python -m tools.train_demo.data --out DIRECTORY`, from the repository's root.

Owns the arrays' format, which README.md describes. Needs WordNet's files (Debian: `apt-get install wordnet-base`), no
GPU, and half a minute. The same WordNet, seed and tokenizers release give the same bytes.
"""

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from slotpy.engine.chat import ChatTemplate
from tools.train_demo import samples as composing
from tools.train_demo import tokenizer as bpe
from tools.train_demo.samples import END_OF_TURN, Sample
from tools.train_demo.wordnet import WordNet
from tools.train_demo.words import choose

BOUNDARY, PROMPT, REPLY = 0, 1, 2
"""Codes of `loss_mask`: no loss, a small weight (0.1 is meant), weight 1. A code is that of the token to predict."""

SEED = 20_261_129
NUM_WORDS = 8000
NUM_PASSING = 60_000
"""Further words, of which each epoch sees a few."""


def load_template() -> ChatTemplate:
    """Read the template that the trained model ships with."""
    return ChatTemplate(bpe.TEMPLATE.read_text(encoding="utf-8"), {})


def encode(tokenizer: Tokenizer, template: ChatTemplate, sample: Sample) -> tuple[list[int], list[int]]:
    """Give a sample's token ids and loss codes, ending with the boundary between documents.

    Prompt and reply are encoded apart, as at run time, where the prompt's last token is fixed before the first of the
    reply. Earlier replies lie in the prompt and are learned too, being what the model writes without a switch.
    """
    prompt = sample.prompt(template)
    spans = []
    for turn, message in enumerate(sample.messages[:-1]):
        if message["role"] == "assistant":
            start = len(sample.prompt(template, turn))
            spans.append((start, prompt.index(END_OF_TURN, start) + len(END_OF_TURN)))
    before = tokenizer.encode(prompt, add_special_tokens=False)
    reply = tokenizer.encode(sample.reply(template), add_special_tokens=False).ids
    codes = [
        REPLY if any(start <= begin and end <= stop for start, stop in spans) else PROMPT
        for begin, end in before.offsets
    ]
    codes[0] = BOUNDARY  # nothing comes before it
    ids = [*before.ids, *reply, tokenizer.token_to_id(bpe.END_OF_TEXT)]
    return ids, [*codes, *[REPLY] * len(reply), BOUNDARY]


def pack(tokenizer: Tokenizer, template: ChatTemplate, samples: Sequence[Sample]) -> dict[str, np.ndarray]:
    """Join the samples: `tokens` (T,), `loss_mask` (T,), and `sample_starts` (N + 1,), which ends with T."""
    tokens: list[int] = []
    codes: list[int] = []
    starts = [0]
    for sample in samples:
        ids, marks = encode(tokenizer, template, sample)
        tokens += ids
        codes += marks
        starts.append(len(tokens))
    return {
        "tokens": np.array(tokens, dtype=np.uint16),
        "loss_mask": np.array(codes, dtype=np.uint8),
        "sample_starts": np.array(starts, dtype=np.uint32),
    }


def questions(template: ChatTemplate, samples: Sequence[Sample]) -> list[dict[str, object]]:
    """Describe samples for eval.json: what to render, the rendered prompt, and the text that must come back."""
    return [
        {
            "kind": sample.kind,
            "messages": sample.messages[:-1],
            "enable_thinking": sample.thinking,
            "with_tools": sample.with_tools,
            "prompt": sample.prompt(template),
            "expected": sample.reply(template).removesuffix(END_OF_TURN),
        }
        for sample in samples
    ]


def write(wordnet: WordNet, out: Path, *, num_words: int, seed: int, num_ids: int = bpe.NUM_IDS) -> dict[str, object]:
    """Write tokenizer, arrays and questions to `out`; give the counts that go to stats.json too."""
    template = load_template()
    entries = choose(wordnet, num_words)
    learned, held_out = composing.hold_out(entries, seed)
    taken = {entry.word for entry in entries}
    hidden = {entry.definition for entry in held_out}
    others = [
        entry
        for entry in choose(wordnet, num_words + NUM_PASSING)
        if entry.word not in taken and entry.definition not in hidden
    ]
    known = {word for word, _ in wordnet.senses}
    samples = composing.compose(learned, known.__contains__, seed)
    passing = composing.passing(others, seed)
    tokenizer = bpe.train((s.prompt(template) + s.reply(template) for s in (*samples, *passing)), num_ids)
    out.mkdir(parents=True, exist_ok=True)
    bpe.write(out, tokenizer)
    train = pack(tokenizer, template, [*samples, *passing])
    np.savez_compressed(out / "train.npz", **train, num_repeated=np.uint32(len(samples)))
    np.savez_compressed(
        out / "heldout.npz",
        **pack(tokenizer, template, [composing.plain_definition(entry) for entry in held_out]),
    )
    sets = {
        "exact": composing.exact(learned, seed),
        "rephrased": composing.rephrased(learned, seed),
        "golden": composing.golden(learned),
    }
    evaluation = {"tools": [composing.phrases.TOOL]} | {
        name: questions(template, chosen) for name, chosen in sets.items()
    }
    (out / "eval.json").write_text(json.dumps(evaluation, indent=1) + "\n", encoding="utf-8")
    stats = _stats(train, [*samples, *passing]) | {
        "words": len(entries),
        "learned": len(learned),
        "held_out": len(held_out),
    }
    stats |= {"seed": seed, "ids": num_ids} | {name: len(chosen) for name, chosen in sets.items()}
    (out / "stats.json").write_text(json.dumps(stats, indent=1) + "\n", encoding="utf-8")
    return stats


def _stats(train: dict[str, np.ndarray], samples: Sequence[Sample]) -> dict[str, object]:
    lengths = np.diff(train["sample_starts"].astype(np.int64))
    replies = np.add.reduceat(train["loss_mask"] == REPLY, train["sample_starts"][:-1].astype(np.int64), dtype=np.int64)
    definitions = np.array([sample.kind == "definition" for sample in samples])
    return {
        "samples": len(samples),
        "samples_by_kind": dict(Counter(sample.kind for sample in samples).most_common()),
        "tokens": int(lengths.sum()),
        "reply_tokens": int(replies.sum()),
        "longest_sample_tokens": int(lengths.max()),
        "sample_tokens_percentiles": {p: int(np.percentile(lengths, p)) for p in (50, 90, 99)},
        "mean_definition_sample_tokens": round(float(lengths[definitions].mean()), 1),
        "mean_definition_reply_tokens": round(float(replies[definitions].mean()), 1),
        "distinct_ids": len(np.unique(train["tokens"])),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the demo model's training data.")
    parser.add_argument("--wordnet", type=Path, default=Path("/usr/share/wordnet"), help="directory of WordNet's files")
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    parser.add_argument("--words", type=int, default=NUM_WORDS, help=f"size of the dictionary, {NUM_WORDS} by default")
    parser.add_argument("--seed", type=int, default=SEED)
    arguments = parser.parse_args()
    stats = write(WordNet(arguments.wordnet), arguments.out, num_words=arguments.words, seed=arguments.seed)
    print(json.dumps(stats, indent=1))


if __name__ == "__main__":
    main()
