"""Tokens by themselves: the bytes and the printable name of one token id, for log-probabilities and trees."""

import copy
import re
from typing import Any

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_WORD_START = "\u2581"  # SentencePiece writes a leading space so
_REPLACEMENT = "\ufffd"


class TokenNames:
    """Bytes and names of token ids, remembered once found. Used on one thread: it owns a copy of the tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = copy.deepcopy(tokenizer)
        self._bytes: dict[int, bytes] = {}

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes that the token adds to a text; part of a character for some."""
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = self._find_bytes(token_id)
        return found

    def name_of(self, token_id: int) -> str:
        """The token's text; ``bytes:\\xe2\\x80`` where its bytes are no whole characters, as the API writes it."""
        raw = self.bytes_of(token_id)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def _find_bytes(self, token_id: int) -> bytes:
        text = self._tokenizer.decode([token_id], skip_special_tokens=False)
        piece = self._tokenizer.convert_ids_to_tokens(token_id)
        if not isinstance(piece, str):
            return str(text).encode()  # an id past the tokenizer's last: the output matrix may be larger
        single = _BYTE_PIECE.fullmatch(piece)
        if single:
            return bytes([int(single[1], 16)])
        if all(char in _BYTE_OF for char in piece):
            raw = bytes(_BYTE_OF[char] for char in piece)
            # Only the tokenizer knows whether its pieces are written in the byte alphabet: its own decoding decides.
            if raw.decode("utf-8", "replace") == text:
                return raw
        if _REPLACEMENT not in text and piece.startswith(_WORD_START) and not text.startswith(" "):
            return (" " + text).encode()  # decoding a list strips the space of its first word
        return str(text).encode()


def _byte_alphabet() -> dict[str, int]:
    """The characters byte-level tokenizers write bytes with: printable ones as themselves, others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + place): byte for place, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
