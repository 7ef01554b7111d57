"""Train the demo's tokenizer, a byte-level BPE of 4,080 ids, and write it with its template and generation settings.

Owns the ids. A model has 4,096 rows: the 16 beyond the tokenizer stay unused, as published vocabularies are padded.
"""

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

VOCAB_SIZE = 4096
NUM_IDS = 4080
END_OF_TEXT, END_OF_TURN = "<|endoftext|>", "<|im_end|>"
CONTROL_TOKENS = (END_OF_TEXT, "<|im_start|>", END_OF_TURN)
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")  # ordinary added tokens: decoded, they are text

TEMPLATE = Path(__file__).parent / "chat_template.jinja"

_ADDED = re.compile("|".join(map(re.escape, CONTROL_TOKENS + TAGS)))


def train(texts: Iterable[str], num_ids: int = NUM_IDS) -> Tokenizer:
    """Train on rendered conversations; the same texts give the same merges.

    Raises: ValueError when there is too little text for `num_ids`.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=num_ids - len(CONTROL_TOKENS) - len(TAGS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_pieces(texts), trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in CONTROL_TOKENS])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in TAGS])
    found = tokenizer.get_vocab_size(with_added_tokens=True)
    if found != num_ids:
        raise ValueError(f"Got {found} ids, wanted {num_ids}: too little text.")
    return tokenizer


def write(directory: Path, tokenizer: Tokenizer) -> None:
    """Write the files that make the directory's text side a published checkpoint's."""
    (directory / "tokenizer.json").write_text(tokenizer.to_str(pretty=False) + "\n", encoding="utf-8")
    config = {"eos_token": END_OF_TURN, "pad_token": END_OF_TEXT, "tokenizer_class": "PreTrainedTokenizerFast"}
    _write_json(directory / "tokenizer_config.json", config)
    stops = [tokenizer.token_to_id(END_OF_TURN), tokenizer.token_to_id(END_OF_TEXT)]
    generation = {"do_sample": False, "eos_token_id": stops, "max_new_tokens": 200}
    _write_json(directory / "generation_config.json", generation)
    (directory / "chat_template.jinja").write_bytes(TEMPLATE.read_bytes())


def _pieces(texts: Iterable[str]) -> Iterator[str]:
    """Yield the text between added tokens, which is all that the merges ever see."""
    for text in texts:
        yield from filter(None, _ADDED.split(text))


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
