"""What --accept race saves and --accept confirm lets through, measured: searches alone, on the embedded model.

    for seed in 0 1 2; do for domain in math search chess; do for accept in best race; do       # chess: --iterations 5
      bash run.sh search-harness $domain --accept $accept --iterations 8 --seed $seed --out DIR \
        --name $domain-$accept-$seed
    done; done; done
    for seed in $(seq 0 19); do                 # a small harness split, so that luck is large; seeds 10 to 19 also with
      bash run.sh search-harness math --accept confirm --iterations 3 --seed $seed --name confirm-$seed --out DIR \
        --harness-set "embedded/math/harness.jsonl[0:64]"               # --harness DIR/math-best-0/final_harness.py
    done
    # where the archive's best was not confirmed: `bash run.sh eval math --harness ... --seed $seed --n 8 --json`
    # into DIR/confirm-$seed/best_on_test.json
    .venv/bin/python results/acceptance_runs.py DIR      takes the runs in: results/acceptance.json
    .venv/bin/python results/update_readme.py       writes the tables of PROPOSERS.md
"""

import json
import sys
from pathlib import Path

FILE = Path(__file__).resolve().parent / "acceptance.json"


def collect(folder: Path) -> dict:
    """The runs' own numbers."""
    found = {"searches": [], "confirmed": []}
    for run in sorted(path.parent for path in folder.glob("*/summary.json")):
        summary = json.loads((run / "summary.json").read_text())
        if not summary["complete"]:
            continue
        archive = run / "harness" / "cycle_01"
        rows = [json.loads(line) for line in (archive / "history.jsonl").read_text().splitlines()]
        accepted = json.loads((archive / "acceptance.json").read_text())
        row = {"domain": summary["domain"], "seed": summary["seed"], "accept": summary["accept"],
               "version": summary["version"], "rollouts": summary["rollouts"]["harness"],
               "gates": summary["rollouts"]["gates"], "n_candidates": len(rows), "name": accepted["name"],
               "base": summary["base_mean8"]["mean"], "final": summary["final_mean8"]["mean"]}
        if summary["accept"] != "confirm":
            found["searches"].append(row)
            continue
        best = min((r for r in rows if not r["refused"]), key=lambda r: (-r["mean"], r["calls_a_rollout"]))["name"]
        other = run / "best_on_test.json"
        of_best = json.loads(other.read_text())["mean"] if other.exists() else row["final"]
        found["confirmed"].append(row | {"best": best, "best_on_test": of_best, "rows": accepted["confirmed"]})
    return found


def block(found: dict) -> str:
    """The tables."""
    pairs = {}
    for row in found["searches"]:
        pairs.setdefault((row["domain"], row["seed"]), {})[row["accept"]] = row
    lines = ["| domain | seed | harnesses | scoring rollouts, `best` | `race` | ratio | accepted | test mean@8, `best` "
             "| `race` |", "|" + " --- |" * 9]
    total = {"best": 0, "race": 0}
    for (domain, seed), pair in sorted(pairs.items()):
        if len(pair) < 2:
            continue
        best, race = pair["best"], pair["race"]
        total["best"] += best["rollouts"]
        total["race"] += race["rollouts"]
        names = best["name"] if best["name"] == race["name"] else f"{best['name']}, {race['name']}"
        lines.append(f"| {domain} | {seed} | {best['n_candidates']} | {best['rollouts']:,} | {race['rollouts']:,} | "
                     f"{race['rollouts'] / best['rollouts']:.2f} | {names} | {best['final']:.3f} | "
                     f"{race['final']:.3f} |")
    lines.append(f"| all | | | {total['best']:,} | {total['race']:,} | {total['race'] / total['best']:.2f} | | | |")
    rows = found["confirmed"]
    kept = [row for row in rows if row["name"] == "h0"]
    strong = [row for row in rows if row["base"] > 0.4]
    worst = min(row["final"] - row["base"] for row in rows)
    gains = [sum(row[which] - row["base"] for row in rows) / len(rows) for which in ("final", "best_on_test")]
    worst_best = min(row["best_on_test"] - row["base"] for row in rows)
    return "\n".join(lines) + f"""

`confirm`: {len(rows)} searches on math of {rows[0]['n_candidates']} harnesses each, scored on 64 tasks, so that luck is
large; {len(rows) - len(strong)} begin at h0, {len(strong)} at a harness that an earlier search had accepted. It
accepted a candidate in {len(rows) - len(kept)}, else the incoming harness stayed. On test, mean@8 less that of
the incoming harness: worst {worst:+.3f}, mean {gains[0]:+.3f}; what `best` would have accepted in the same
searches: worst {worst_best:+.3f}, mean {gains[1]:+.3f}. `results/acceptance_runs.py` has the commands."""


if __name__ == "__main__":
    FILE.write_text(json.dumps(collect(Path(sys.argv[1])), indent=1) + "\n")
