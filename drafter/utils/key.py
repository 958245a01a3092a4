"""The key of a server, from the environment, and from nowhere else."""

import os
from urllib.parse import urlsplit


def key_header() -> dict[str, str]:
    """The header with the key of OPENAI_API_KEY, without white space around the key; empty without a key.

    Raises:
        ValueError: the key holds a character that no header may hold.
    """
    key = os.environ.get("OPENAI_API_KEY", "").strip()
    if not (key.isascii() and key.isprintable()):  # httpx's own error would show the key
        raise ValueError("OPENAI_API_KEY holds a character that no key has, such as an end of line: set it again")
    return {"Authorization": f"Bearer {key}"} if key else {}


def refuse_password(flag: str, url: str) -> None:
    """ValueError for an address with a user's name or password: results and records of runs would show them."""
    if "@" in urlsplit(url).netloc:
        raise ValueError(f"{flag} holds a user name or a password: give the address alone, and a key as OPENAI_API_KEY")
