"""The header of a GGUF file: its values, and where its tensors lie.

Names, types and sizes are checked against the file before anything is read, so that what is read is never more than
the file. Source: the format's own specification.
"""

import math
import mmap
import os
import struct
import weakref
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

_MOST_VALUES = 1 << 24  # of a list or a text
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_F32 = 0  # of the types of tensors
_VOCABULARY = tuple(f"tokenizer.ggml.{name}" for name in ("tokens", "merges", "scores", "token_type"))


class Info(NamedTuple):
    """A tensor: its shape, outermost size first; the number of its type; its first byte in the file."""

    shape: tuple[int, ...]
    kind: int
    start: int


class Header(NamedTuple):
    """The header of a file: values by key, a list being None unless lists were asked for; and tensors by the file's
    names. ``small`` is the header with the vocabulary's size in place of its lists, as the beginning of a file of the
    format, up to its tensors; where lists were asked for. ``memory`` is the mapped file, uint8.
    """

    values: dict[str, Any]
    tensors: dict[str, Info]
    small: bytes
    memory: np.ndarray

    def value(self, key: str) -> Any:
        """A value; None where the header lacks the key. ARCH stands for the architecture's name."""
        return self.values.get(self.values["general.architecture"] + key[4:] if key.startswith("ARCH.") else key)

    def numbers(self, name: str) -> np.ndarray:
        """The numbers of a float32 tensor; of another type, none."""
        shape, kind, start = self.tensors[name]
        return self.memory[start : start + (4 * math.prod(shape) if kind == _F32 else 0)].view(np.float32)


def read_header(file: Path, *, has_lists: bool = False) -> Header:
    """The header of a GGUF file (ValueError: one that does not describe its file; names the file)."""
    memory = mapped(file)
    try:
        return _read(memory, has_lists)
    except (struct.error, IndexError, KeyError, UnicodeDecodeError, OverflowError, MemoryError, ValueError) as error:
        raise ValueError(f"{file} is damaged: its header is no GGUF ({error})") from error


def _read(memory: np.ndarray, has_lists: bool) -> Header:
    view, at = memoryview(memory.data), 24
    magic, version, num_tensors, num_keys = struct.unpack_from("<4sIQQ", view)
    if magic != b"GGUF" or version not in (2, 3) or max(num_tensors, num_keys) > len(view):
        raise ValueError(f"version {version}, {num_tensors} tensors, {num_keys} keys")

    def text() -> str:
        nonlocal at
        (size,) = struct.unpack_from("<Q", view, at)
        at += 8 + size
        if at > len(view) or size > _MOST_VALUES:
            raise ValueError(f"a text of {size} bytes")
        return str(view[at - size : at], "utf-8")

    def value(kind: int) -> Any:
        nonlocal at
        if kind == _STRING:
            return text()
        if kind != _ARRAY:
            code = "<" + _SCALARS[kind]
            (found,) = struct.unpack_from(code, view, at)
            at += struct.calcsize(code)
            return found
        inner, number = struct.unpack_from("<IQ", view, at)
        at += 12
        if number > _MOST_VALUES:
            raise ValueError(f"a list of {number} values")
        if inner == _ARRAY:
            raise ValueError("a list of lists")
        if inner == _STRING and has_lists:
            return [text() for _ in range(number)]
        start = at
        if inner == _STRING:
            unpack = struct.Struct("<Q").unpack_from
            for _ in range(number):
                at += 8 + unpack(view, at)[0]
        else:
            at += number * struct.calcsize("<" + _SCALARS[inner])
        if at > len(view):
            raise ValueError("a list ends behind the file")
        return struct.unpack_from(f"<{number}{_SCALARS[inner]}", view, start) if has_lists else None

    values: dict[str, Any] = {}
    kept = []
    for _ in range(num_keys):
        start, key = at, text()
        if key in values:
            raise ValueError(f"{key[:80]!r} twice")
        (kind,) = struct.unpack_from("<I", view, at)
        at += 4
        values[key] = value(kind)
        if key not in _VOCABULARY:
            kept.append(view[start:at])
    size = f"{values.get('general.architecture')}.vocab_size"
    if has_lists and size not in values:
        field, number = size.encode(), len(values.get("tokenizer.ggml.tokens", ()))
        kept.append(memoryview(struct.pack(f"<Q{len(field)}sII", len(field), field, 4, number)))
    infos: dict[str, tuple[tuple[int, ...], int, int]] = {}
    start = at
    for _ in range(num_tensors):
        name = text()
        if name in infos:
            raise ValueError(f"{name[:80]!r} twice")
        (rank,) = struct.unpack_from("<I", view, at)
        if not 1 <= rank <= 4:
            raise ValueError(f"{name[:80]!r} has {rank} dimensions")
        *sizes, kind, offset = struct.unpack_from(f"<{rank}QIQ", view, at + 4)
        at += 4 + 8 * rank + 12
        infos[name] = tuple(reversed(sizes)), kind, offset
    small = b"".join([struct.pack("<4sIQQ", magic, version, num_tensors, len(kept)), *kept, view[start:at]])
    alignment = values.get("general.alignment", 32)
    if type(alignment) is not int or not 0 < alignment <= 1 << 20:
        raise ValueError(f"an alignment of {alignment}")
    data = -(-at // alignment) * alignment
    tensors = {}
    for name, (shape, kind, offset) in infos.items():
        if not all(shape) or offset % alignment or data + offset > len(view):
            raise ValueError(f"{name[:80]!r}, {list(shape)}, does not fit the file")
        tensors[name] = Info(shape, kind, data + offset)
    return Header(values, tensors, small + bytes(-len(small) % alignment), memory)


class _File(mmap.mmap):
    descriptor: int


def mapped(file: Path) -> np.ndarray:
    """The bytes of a file where they lie (ValueError: it is empty)."""
    with file.open("rb") as stream:
        if not file.stat().st_size:
            raise ValueError(f"{file} is empty")
        made = _File(stream.fileno(), 0, access=mmap.ACCESS_READ)
        made.descriptor = os.dup(stream.fileno())
        weakref.finalize(made, os.close, made.descriptor)
        return np.frombuffer(made, dtype=np.uint8)


def whole(data: np.ndarray) -> np.ndarray:
    """A copy of a part of :func:`mapped`, so that no page of the file stays in this process; other bytes themselves
    (ValueError: the file was shortened; whoever touched the missing bytes would end the process).
    """
    root: Any = data
    while isinstance(root.base, np.ndarray):
        root = root.base
    file = root.base.obj if isinstance(root.base, memoryview) else None
    if not isinstance(file, _File):
        return data
    start, copy = data.ctypes.data - root.ctypes.data, np.empty(data.shape, np.uint8)
    left = memoryview(copy.reshape(-1).data)
    while left:
        number = os.preadv(file.descriptor, [left], start + copy.nbytes - len(left))
        if not number:
            raise ValueError("the file was shortened while it was read")
        left = left[number:]
    return copy
