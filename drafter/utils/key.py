"""The key of a server, from the environment."""

import os


def key_header() -> dict[str, str]:
    """The header with the key of OPENAI_API_KEY, without white space around the key; empty without a key.

    Raises:
        ValueError: the key holds a character that no header may hold.
    """
    key = os.environ.get("OPENAI_API_KEY", "").strip()
    if not (key.isascii() and key.isprintable()):  # httpx's own error would show the key
        raise ValueError("OPENAI_API_KEY holds a character that no key has, such as an end of line: set it again")
    return {"Authorization": f"Bearer {key}"} if key else {}
