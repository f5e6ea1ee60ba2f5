"""What can be seen of a process from outside, through /proc: for the tests that look for what grows or remains."""

import re
from pathlib import Path


def family_of(pid: int) -> list[int]:
    """The process and all below it, whatever sessions they are in."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (words := stat_of(int(entry.name))):
            parents[int(entry.name)] = int(words[1])
    family, before = {pid} & parents.keys(), set()
    while family != before:
        before, family = family, family | {child for child, parent in parents.items() if parent in family}
    return sorted(family)


def stat_of(pid: int) -> list[str]:
    """/proc/PID/stat from the state on; [] if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def status_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return ""


def pss_of(pid: int) -> int:
    """Bytes. Of a jailed one, into which only root may look, what it shares is counted too."""
    try:
        found = re.search(r"^Pss:\s+(\d+)", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
        return int(found[1]) << 10 if found else 0
    except PermissionError:
        found = re.search(r"^VmRSS:\s+(\d+)", status_of(pid), re.MULTILINE)
        return int(found[1]) << 10 if found else 0
    except OSError:
        return 0                                        # gone


def anonymous_of(pid: int) -> int:
    """Bytes that are no file's. Unlike PSS it does not change when another process that shared a library ends."""
    try:
        found = re.search(r"^Anonymous:\s+(\d+)", Path(f"/proc/{pid}/smaps_rollup").read_text(), re.MULTILINE)
    except PermissionError:                             # a jailed one: only root may look into it
        found = re.search(r"^RssAnon:\s+(\d+)", status_of(pid), re.MULTILINE)
    except OSError:
        return 0                                        # gone
    return int(found[1]) << 10 if found else 0


def count_in(path: Path) -> int:
    try:
        return len(list(path.iterdir()))
    except OSError:
        return 0


def size_of(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size
        except OSError:
            pass                                        # pruned a moment ago
    return total
