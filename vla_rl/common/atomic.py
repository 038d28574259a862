"""Files and folders that appear whole or not at all, with the permissions that the umask gives. Imports no torch."""

from __future__ import annotations

import errno
import glob
import os
import shutil
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_OLD = "-old"  # Ends the name of a folder that is being replaced.


class DiskFullError(OSError):
    """The disk is full; errno is ENOSPC, the message says what needed room, and where."""


@contextmanager
def atomic_folder(path: Path, what: str, replace: bool = False, exclusive: bool = False) -> Iterator[Path]:
    """Yield a temporary sibling folder that becomes `path` when the block ends without error.

    With `replace` False and `path` made by someone else meanwhile, theirs is kept and ours dropped
    (both are then taken to be the same content, as caches are); with `exclusive` that is an error. An empty folder
    counts as none. Left-overs of killed writers are removed, and what one had taken away is put back.

    Raises:
        DiskFullError: the disk is full.
        FileExistsError: `exclusive`, and `path` is there when ours is ready.
    """
    path = Path(path)
    partial = path.parent / f".{path.name}.partial-{socket.gethostname()}-{os.getpid()}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        restore_replaced(path)
        for leftover in _leftovers(path):
            shutil.rmtree(leftover, ignore_errors=True)
        partial.mkdir()
        yield partial
        _follow_umask(partial)
        for file in sorted(partial.rglob("*")):
            _fsync(file)
        _fsync(partial)
        _publish(partial, path, replace)
        if exclusive and partial.exists():
            raise FileExistsError(
                errno.EEXIST,
                f"the {what} was not written: something is there already. Move it away and run again",
                str(path),
            )
        _fsync(path.parent)
    except DiskFullError:
        raise
    except Exception as error:  # safetensors has an error of its own, and a simulator's Python may lack safetensors.
        if is_disk_full(error):
            raise disk_full(path, what) from error
        raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _follow_umask(folder: Path) -> None:
    """Open the files in a folder made just now to whom it is open: safetensors writes them for their owner alone."""
    open_to = stat.S_IMODE(folder.stat().st_mode) & 0o666
    for file in folder.rglob("*"):
        if file.is_file() and not file.is_symlink():
            file.chmod(stat.S_IMODE(file.stat().st_mode) | open_to)


def restore_replaced(path: Path) -> None:
    """Put back the folder that a writer took away to replace it, if it was killed before its own was there.

    Readers of a folder that is replaced call this first; `atomic_folder` does it too.
    """
    for leftover in _leftovers(Path(path)):
        if leftover.name.endswith(_OLD) and not path.exists():
            os.rename(leftover, path)


def write_text_atomic(path: Path, text: str) -> None:
    """Write a text file so that a reader sees the old or the new content, never half."""
    path = Path(path)
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        with partial.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        raise (disk_full(path, "file") if is_disk_full(error) else error) from None
    finally:
        partial.unlink(missing_ok=True)


def is_disk_full(error: BaseException) -> bool:
    """Whether an error, from Python or from a library that words its own, means that the disk is full."""
    return getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "No space left on device" in str(error)


def disk_full(path: Path, what: str) -> DiskFullError:
    """The error to raise when writing `path` ran out of disk."""
    existing = next(p for p in (path, *path.resolve().parents) if p.exists())
    free = shutil.disk_usage(existing).free / 2**20
    return DiskFullError(
        errno.ENOSPC,
        f"disk full while writing the {what} {path} ({free:.0f} MiB free there). "
        "Nothing half-written was kept. Free some space, or choose another folder, and run again",
    )


def _publish(partial: Path, path: Path, replace: bool) -> None:
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        if not replace:
            return
        old = path.parent / (partial.name + _OLD)
        os.rename(path, old)
        os.rename(partial, path)
        shutil.rmtree(old)
        return
    try:
        os.rename(partial, path)
    except OSError as error:
        if replace or error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise


def _leftovers(path: Path) -> list[Path]:
    """Partial and taken-away folders of this target whose writer, on this host, no longer runs."""
    start = f".{path.name}.partial-{socket.gethostname()}-"
    found = []
    for leftover in path.parent.glob(f"{glob.escape(start)}*"):
        pid = leftover.name[len(start) :].partition("-")[0]
        if pid.isdigit() and (int(pid) == os.getpid() or not is_running(int(pid))):
            found.append(leftover)
    return found


def is_running(pid: int) -> bool:
    """Whether a process of this number runs on this machine."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
