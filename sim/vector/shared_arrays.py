"""Shared-memory arrays by name.

The memory has no name in the file system, so nothing of it can be left behind, whatever kills the
processes, and it does not count against the size of /dev/shm, which is small in containers.
"""

from __future__ import annotations

import math
import mmap
import os
import tempfile
import weakref

import numpy as np

# array name -> (shape, dtype name)
Layout = dict[str, tuple[tuple[int, ...], str]]

_ALIGN = 64


class SharedArrays:
    """One block of anonymous shared memory, cut into arrays by `layout`.

    The creator leaves `fd` out; another process attaches with the file descriptor it was sent
    (`multiprocessing.reduction.send_handle`). New memory is zero.
    """

    def __init__(self, layout: Layout, fd: int | None = None) -> None:
        self.layout = layout
        self.offsets: dict[str, int] = {}
        size = 0
        for name, (shape, dtype) in layout.items():
            self.offsets[name] = size
            size += -(-math.prod(shape) * np.dtype(dtype).itemsize // _ALIGN) * _ALIGN
        self.size = max(size, _ALIGN)
        self.fd = _anonymous_file(self.size) if fd is None else fd
        self._finalizer = weakref.finalize(self, os.close, self.fd)  # also where nobody closes it
        memory = mmap.mmap(self.fd, self.size)
        self._arrays = {
            name: np.ndarray(shape, dtype, buffer=memory, offset=self.offsets[name])
            for name, (shape, dtype) in layout.items()
        }

    def __getitem__(self, name: str) -> np.ndarray:
        return self._arrays[name]

    def close(self) -> None:
        """Let go of the memory; the system frees it when the last process has, and no array is in use."""
        self._arrays = {}
        self._finalizer()
        self.fd = -1


def _anonymous_file(size: int) -> int:
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("vla-rl")
    else:  # macOS
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, size)
    return fd
