"""Text to token ids and back: the checkpoint's tokenizer, and decoding that streams.

Owns `tokenizer.json` and `tokenizer_config.json`. Knows no chat template (chat.py) and no model; serves the engine.
Only byte-level tokenizers are read: every family that slotpy runs has one, and their tokens are exact bytes.
"""

import codecs
import json
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from slotpy.errors import SlotpyError


class Tokenizer:
    """Encode and decode with a checkpoint's tokenizer.

    `special_tokens` maps roles to text, e.g. `eos_token` to `<|im_end|>`: chat templates ask for them by role.
    """

    def __init__(self, backend: tokenizers.Tokenizer, special_tokens: dict[str, str]) -> None:
        self._backend = backend
        self.special_tokens = special_tokens

    @classmethod
    def load(cls, directory: Path) -> "Tokenizer":
        """Read the tokenizer of a checkpoint directory.

        Raises: SlotpyError when a file is missing or damaged, when `tokenizer_config.json` gives an added token another
            id than `tokenizer.json`, or when the tokenizer is not byte-level.
        """
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise SlotpyError(
                f"{directory} has no tokenizer.json, so text cannot be encoded.",
                hint="Copy tokenizer.json and tokenizer_config.json from the model's repository into it.",
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception for whatever it cannot parse
            raise SlotpyError(f"{path} is not a tokenizer: {error}", hint="Fetch the file again.") from error
        if not isinstance(backend.decoder, tokenizers.decoders.ByteLevel):
            raise SlotpyError(f"{path} has the decoder {backend.decoder}; slotpy reads byte-level tokenizers only.")
        backend.no_truncation()  # some published files carry the limits of their training run
        backend.no_padding()
        config = read_json(directory / "tokenizer_config.json")
        _add_tokens(backend, config.get("added_tokens_decoder") or {}, path)
        return cls(backend, special_tokens(config))

    @cached_property
    def num_ids(self) -> int:
        """One more than the highest id. A model's vocabulary may be padded beyond it."""
        return max(self._backend.get_vocab(with_added_tokens=True).values()) + 1

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of control tokens, which decoding hides. Think tags are usually ordinary added tokens, so text."""
        added = self._backend.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Encode text in which the names of special tokens stand for them.

        So `<|im_end|>` typed by a user ends their turn, as with Ollama, llama.cpp and transformers, which encode the
        rendered conversation as one string: whoever writes the prompt is trusted with it. `add_special_tokens` adds
        what the tokenizer puts around a bare text, e.g. a first token; a chat template has its own. Lone surrogates,
        which JSON and argv can carry, become U+FFFD.
        """
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        # A batch, because `encode` keeps all other threads waiting: 0.75 s for 200,000 tokens (tokenizers 0.23).
        [encoded] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return list(encoded.ids)

    def decode(self, ids: Iterable[int]) -> str:
        """Decode ids at once, without special tokens; bytes that are no UTF-8 become U+FFFD."""
        return str(self._backend.decode(list(ids), skip_special_tokens=True))

    def token_id(self, text: str) -> int | None:
        """Give the id of the token spelt exactly `text`, or None."""
        found: int | None = self._backend.token_to_id(text)
        return found

    def token_bytes(self, token_id: int) -> bytes:
        """Give the bytes a token adds to the text: part of a character perhaps, none for a special or unknown id."""
        spelling = self._backend.id_to_token(token_id)
        if spelling is None or token_id in self.special_ids:
            return b""
        try:
            return bytes(_BYTE_OF_CHARACTER[character] for character in spelling)
        except KeyError:  # an added token spelt with other characters stands for itself
            return str(spelling).encode()


class StreamDecoder:
    """Decode one reply as its tokens arrive, never handing out part of a character.

    The texts of all `push` calls and the final `flush` join to exactly `Tokenizer.decode` of the ids.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """Give the characters that this token completes, often none."""
        return self._utf8.decode(self._tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        """End the reply: give U+FFFD if it stops inside a character."""
        return self._utf8.decode(b"", final=True)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from one of a checkpoint's optional files; `{}` when there is no such file.

    Raises: SlotpyError naming the file when it holds anything else.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise SlotpyError(f"Cannot read {path}: {error}.", hint="Fetch the file again.") from error
    if not isinstance(value, dict):
        raise SlotpyError(f"{path} must hold a JSON object, found {type(value).__name__}.", hint="Fetch it again.")
    return value


def special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Read the roles of special tokens from a `tokenizer_config.json`, where each is a text or an object with one."""
    tokens = {}
    for role, value in config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if role.endswith("_token") and isinstance(content, str):
            tokens[role] = content
    return tokens


def _add_tokens(backend: tokenizers.Tokenizer, declared: dict[str, Any], path: Path) -> None:
    """Add the tokens that only `tokenizer_config.json` declares, and refuse ids that the two files disagree on."""
    for token_id, fields in sorted(declared.items(), key=lambda item: int(item[0])):
        content = fields["content"]
        if backend.token_to_id(content) is None:
            flags = {name: bool(fields.get(name, False)) for name in ("lstrip", "rstrip", "single_word", "normalized")}
            backend.add_tokens([tokenizers.AddedToken(content, special=bool(fields.get("special", False)), **flags)])
        if backend.token_to_id(content) != int(token_id):
            raise SlotpyError(
                f"{path} gives {content!r} the id {backend.token_to_id(content)}, tokenizer_config.json beside it "
                f"{token_id}.",
                hint="Fetch both files from the same revision.",
            )


def _byte_characters() -> dict[str, int]:
    """Map the characters in which byte-level tokenizers spell bytes: themselves if visible, else U+0100 upwards.

    Source: openai/gpt-2, src/encoder.py (`bytes_to_unicode`)
    """
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = sorted(set(range(0x100)) - set(visible))
    return {chr(byte): byte for byte in visible} | {chr(0x100 + i): byte for i, byte in enumerate(hidden)}


_BYTE_OF_CHARACTER = _byte_characters()
