"""Train the demo model's tokenizer: `python tools/make_demo_tokenizer.py` rewrites slotpy/data/demo/.

A byte-level BPE, trained on the prose of Python's own reference, which every Python installation carries. The committed
files were made with CPython 3.11.7 and tokenizers 0.23.3; other versions carry other text. New files make a new demo
model: raise `VERSION` in slotpy/demo.py with them.
"""

import json
import pydoc_data.topics
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

OUTPUT = Path(__file__).resolve().parent.parent / "slotpy" / "data" / "demo"

NUM_IDS = 3050
CONTROL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
THINK_TAGS = ("<think>", "</think>")  # ordinary added tokens, as in the published tokenizers: decoded, they are text


def prose() -> Iterator[str]:
    """Yield the lines of Python's reference that are sentences rather than rules, tables or code."""
    for _, topic in sorted(pydoc_data.topics.topics.items()):
        for line in topic.splitlines():
            letters = sum(character.isalpha() or character == " " for character in line)
            if letters > 0.85 * len(line):
                yield line.strip() + "\n"


def train() -> Tokenizer:
    """Train the tokenizer; the same text gives the same merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=NUM_IDS - len(CONTROL_TOKENS) - len(THINK_TAGS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(prose(), trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in CONTROL_TOKENS])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in THINK_TAGS])
    num_ids = tokenizer.get_vocab_size(with_added_tokens=True)
    if num_ids != NUM_IDS:
        raise SystemExit(f"Got {num_ids} ids, wanted {NUM_IDS}: too little text.")
    return tokenizer


def main() -> None:
    tokenizer = train()
    OUTPUT.mkdir(parents=True, exist_ok=True)
    (OUTPUT / "tokenizer.json").write_text(tokenizer.to_str(pretty=False) + "\n", encoding="utf-8")
    config = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (OUTPUT / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    print(f"{NUM_IDS} ids in {OUTPUT}")


if __name__ == "__main__":
    main()
