"""Telling files apart without reading all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def add_file(digest: Any, name: str, file: Path) -> None:
    """Into a hash of hashlib's: `name`, and the file's size, beginning and end (64 KiB each)."""
    size = file.stat().st_size
    digest.update(f"{name}:{size}".encode())
    with open(file, "rb") as stream:
        digest.update(stream.read(1 << 16))
        stream.seek(max(size - (1 << 16), 0))
        digest.update(stream.read())
