"""Writes the README's tables, and table.md of each domain, from results/DOMAIN/results.json; takes new results in.

    bash run.sh bench --out results/bench.json            measures anew what "How fast" shows, from results/bench*.json;
    bash run.sh bench --engine vllm --out results/bench-vllm.json                         the same with vLLM
    .venv/bin/python results/update_readme.py runs/compare-math runs/compare-search       takes these in, then writes
    .venv/bin/python results/update_readme.py                                             writes

Everything between `<!-- NAME -->` and `<!-- /NAME -->` in README.md and PROPOSERS.md is this script's;
tests/test_readme.py compares.
"""

import json
import re
import shutil
import sys
from pathlib import Path

RESULTS = Path(__file__).resolve().parent
sys.path[:0] = [str(RESULTS), str(RESULTS.parent)]

import acceptance_runs  # noqa: E402
import bench  # noqa: E402
import compare  # noqa: E402

DOMAINS = ("math", "search", "chess")


def blocks() -> dict[str, str]:
    """The README's blocks by name."""
    found = {domain: json.loads((RESULTS / domain / "results.json").read_text()) for domain in DOMAINS
             if (RESULTS / domain / "results.json").exists()}
    rows, notes = [], []
    for domain, results in found.items():
        (_, _, scores), (_, _, over), *_ = compare.tables_of(results)
        less = {row[0]: f"{row[1]} ({row[2]})" for row in over}
        rows += [[domain, label, *cells, less.get(label, "")] for label, *cells in scores]
        minutes = [sum(amounts["seconds"] for amounts in arm["ledger"].values()) / 60 for arm in results["arms"]]
        notes.append(f"- {domain}: `{'`, `'.join(results['commands'])}`; {compare.provenance(results)}; "
                     f"{min(minutes):.1f} to {max(minutes):.1f} minutes an arm")
    titles = ["domain", "method", "seeds", "base", "best", "final", "final, least to most", "training rollouts",
              "WHALE less it, final (95 %)"]
    table = "\n".join("| " + " | ".join(row) + " |" for row in (titles, ["---"] * len(titles), *rows))
    first = found["math"]["arms"][0]
    lines = "\n".join("{:<6} {:.3f}   {:.3f} - {:.3f}".format(which, first[which]["mean"], *first[which]["ci95"])
                      for which in ("base", "best", "final"))
    measured = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("bench*.json"))]
    return {"bench": bench_block(measured),
            "last lines": f"```\ntest mean@8    95 % interval\n{lines}\n```",
            "results": table + "\n\n" + "\n".join(notes)}


def bench_block(files: list[dict]) -> str:
    """The table of `bash run.sh bench`, with and without vLLM, the machines, and what was left out."""
    titles, says = [*bench.TITLES, "note"], []
    rows = [titles, ["---"] * len(titles)]
    for results in files:
        rows += [[*bench.cells(row), row["note"]] for row in results["rows"]]
        machine, loads = results["machine"], [load[0] for load in results["load"]]
        says += [f"{', '.join(results['seconds'])}: {machine['cores']} cores of {machine['cpu']}, "
                 f"{machine['memory_gib']} GiB, {machine['gpu'] or 'no GPU'}; torch {machine['torch']} on "
                 f"{machine['torch_threads']} threads, transformers {machine['transformers']}, {machine['trl']}; "
                 f"version {machine['commit'][:12]}; load before {loads[0]:.1f}, after {loads[1]:.1f}",
                 *(f"left out: {name}: {why}" for name, why in results["left_out"].items())]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n\n" + "\n".join(f"- {line}" for line in says)


def write(page: str, blocks: dict[str, str]) -> str:
    for name, text in blocks.items():
        page, n = re.subn(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)",
                          lambda match, text=text: f"{match[1]}{text}\n{match[2]}", page, flags=re.DOTALL)
        if n != 1:
            raise SystemExit(f"the page must hold <!-- {name} --> and <!-- /{name} --> once, not {n} times")
    return page


def pages() -> dict[Path, str]:
    """What the pages should hold."""
    root = RESULTS.parent
    accepted = json.loads(acceptance_runs.FILE.read_text())
    of = {"README.md": blocks(), "PROPOSERS.md": {"acceptance": acceptance_runs.block(accepted)}}
    return {root / name: write((root / name).read_text(), texts) for name, texts in of.items()}


if __name__ == "__main__":
    for folder in map(Path, sys.argv[1:]):
        target = RESULTS / json.loads((folder / "results.json").read_text())["domain"]
        target.mkdir(exist_ok=True)
        for name in ("results.json", "curves.png"):
            shutil.copy(folder / name, target / name)
    for domain in DOMAINS:
        results = json.loads((RESULTS / domain / "results.json").read_text())
        (RESULTS / domain / "table.md").write_text(compare.markdown(results, compare.tables_of(results)))
    for path, text in pages().items():
        path.write_text(text)
