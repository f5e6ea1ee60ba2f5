"""Files as a run needs them: written whole or not at all, read with a name in every error, seen when they are changed.

    write_atomically, write_sealed      a kill leaves the old file or the new one; a record has its checksum
    read_text, read_json, read_sealed   Damaged: missing, cut or changed; UsageError: it cannot be read now
    fingerprint                         what files and folders are, to be compared later
"""

import errno
import fcntl
import hashlib
import json
import os
import re
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TextIO

BIG_BYTES = 8 << 20                     # a larger file is not hashed by `fingerprint`
MAX_READ_BYTES = 1 << 30                # of a file that is read whole, and of a line


class UsageError(ValueError):
    """Something the user asked for cannot be done; the message says what to change."""


class Damaged(UsageError):
    """A file of a run is missing, cut or changed. One that only cannot be read now is no such file."""


def refuse_special(path: str | Path) -> None:
    """OSError for what may never end, or never begin: a pipe, a device. To be called before a file is opened."""
    mode = Path(path).stat().st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise OSError(errno.EINVAL, "is a pipe or a device, not a file", str(path))


def refuse_huge(path: str | Path) -> None:
    """OSError for what would fill the memory if it were read whole: nothing that is meant for us is so large."""
    if Path(path).stat().st_size > MAX_READ_BYTES:
        raise OSError(errno.EFBIG, f"is larger than {MAX_READ_BYTES >> 20} MiB", str(path))


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Around the reading of a file of a run: Damaged if it is not there, UsageError if it cannot be read."""
    try:
        refuse_special(path)
        yield
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
        why = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read ({error.strerror})"
        raise Damaged(f"{path} {why}: the directory is not whole") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error.strerror})") from None


def below(folder: Path, name: str) -> Path:
    """folder / name, where a record says the name: Damaged if that would lead out of the folder."""
    path = folder / name
    if not path.resolve().is_relative_to(folder.resolve()):
        raise Damaged(f"{folder} is damaged: {name!r} lies outside")
    return path


def read_bytes(path: Path) -> bytes:
    with reading(path):
        refuse_huge(path)
        return path.read_bytes()


def read_text(path: Path) -> str:
    return read_bytes(path).decode("utf-8", "replace")


def read_json(path: Path) -> dict:
    try:
        record = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        if isinstance(error, UsageError):
            raise
        raise Damaged(f"{path} is damaged: {error}") from None
    if not isinstance(record, dict):
        raise Damaged(f"{path} is damaged: it holds no JSON object")
    return record


def iter_jsonl(path: Path) -> Iterator[dict]:
    """The rows of a file, one at a time."""
    try:
        with reading(path), open(path, encoding="utf-8", errors="replace") as file:
            while line := file.readline(MAX_READ_BYTES):
                yield json.loads(line)
    except (ValueError, RecursionError) as error:
        if isinstance(error, UsageError):
            raise
        raise Damaged(f"{path} is damaged: {error}") from None


def sha256_of_lines(path: Path, n: int) -> str:
    """Of its first n lines; they are read one at a time."""
    seen = hashlib.sha256()
    with reading(path), open(path, "rb") as file:
        for line in islice(file, n):
            seen.update(line)
    return seen.hexdigest()


def write_sealed(path: Path, record: dict) -> None:
    """A record with its checksum, so that a flipped digit is seen."""
    write_atomically(path, json.dumps(record | {"sha256": sha256(json.dumps(record))}, indent=1) + "\n")


def read_sealed(path: Path, remedy: str = "Put it back from a copy") -> dict:
    try:
        record = read_json(path)
        is_whole = record.pop("sha256", None) == sha256(json.dumps(record))
    except Damaged as error:
        raise Damaged(f"{error}. {remedy}") from None
    except RecursionError:                              # writing nests deeper than reading did
        is_whole = False
    if not is_whole:
        raise Damaged(f"{path} is damaged: its checksum is not the recorded one. {remedy}")
    return record


def take_lock(folder: Path, what: str) -> TextIO:
    """Held until it is closed, or until the process ends, however it ends. UsageError if another process holds it."""
    lock = open(folder / ".lock", "a")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UsageError(f"{folder} is in use by another {what}; give this one another --name") from None
    return lock


@contextmanager
def naming(path: Path, *others: type[Exception]) -> Iterator[None]:
    """OSError with a file's name: a full disk is met when a file is written, and that error names none. `others`: the
    very classes that a library raises for it instead."""
    try:
        yield
    except Exception as error:
        if isinstance(error, OSError) and error.strerror:
            error.filename = error.filename or str(path)
            raise
        if not isinstance(error, OSError) and type(error) not in others:
            raise
        raise OSError(errno.EIO, str(error), str(path)) from error


def in_order(paths: Iterable[Path]) -> list[Path]:
    """By the numbers in their names: cycle_99 comes before cycle_100."""
    return sorted(paths, key=lambda path: [int(part) if part.isdigit() else part
                                           for part in re.split("([0-9]+)", str(path))])


def write_atomically(path: Path, text: str) -> None:
    """A kill at any moment, or a power failure, leaves the old file or the new one."""
    aside = path.with_name(f"{path.name}.{os.getpid()}.tmp")          # a report may be rebuilt beside the run
    try:
        with naming(path), open(aside, "w", encoding="utf-8", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except OSError:
        aside.unlink(missing_ok=True)                                 # half a file on a full disk
        raise
    sync(path.parent)


def sync(path: Path) -> None:
    """On disk, also after a power failure: a file's content, or the names in a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def fingerprint(paths: Iterable[Path], but: Path | None = None) -> dict[str, str]:
    """path -> what it is, of these files and of all below these folders, that below `but` left out. Of a file: mode,
    owner, time of its last write, and sha256 or, of more than BIG_BYTES, size, inode and time of its last change (which
    cannot be set back). Of a folder, those above the paths among them, mode and owner only: files come and go in it."""
    found, open_ends = {}, [Path(path).resolve() for path in paths]
    for folder in {path.parent for path in open_ends if path.parent.is_dir()}:
        seen = folder.stat()
        found[str(folder)] = f"folder {seen.st_mode:o} {seen.st_uid} {seen.st_gid}"
    while open_ends:
        path = open_ends.pop()
        if path.name == "__pycache__" or but and path == but.resolve():
            continue
        try:
            seen = path.stat()
            rights = f"{seen.st_mode:o} {seen.st_uid} {seen.st_gid}"
            if stat.S_ISDIR(seen.st_mode) and path.is_symlink():
                found[str(path)] = f"link to {path.readlink()}"
            elif stat.S_ISDIR(seen.st_mode):
                found[str(path)] = f"folder {rights}"
                open_ends += path.iterdir()
            elif seen.st_size > BIG_BYTES:
                found[str(path)] = f"{rights} {seen.st_mtime_ns} {seen.st_size} {seen.st_ino} {seen.st_ctime_ns}"
            elif stat.S_ISREG(seen.st_mode):
                found[str(path)] = f"{rights} {seen.st_mtime_ns} {hashlib.sha256(path.read_bytes()).hexdigest()}"
        except OSError as error:
            found[str(path)] = f"cannot be read: {error.strerror}"
    return found
