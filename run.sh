#!/usr/bin/env bash
# WHALE: the one entry. Sets up .venv from requirements.txt on first use (minutes, needs a package index once); after
# that nothing is downloaded.
#
#   bash run.sh math [--seed 0 ...]      alternate weight and harness phases on the embedded model (about 3 minutes)
#   bash run.sh search | chess           the same on the other two domains (about 4 minutes each)
#   bash run.sh compare math             all methods, three seeds, the same budget: a table and a figure (about 35 minutes)
#   bash run.sh report RUN               rebuilds a run's report.html
#   bash run.sh export RUN --out DIR     its model and harness as a Hugging Face folder
#   bash run.sh bench [--only ...]       how fast it is, against the same work done bare (about 10 minutes)
#   bash run.sh test [pytest flags]      the tests (about 8 minutes)
#   bash run.sh eval | check-harness | sandbox | verify | data | retriever --help       the parts alone
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
words="math search chess compare report export eval check-harness sandbox verify data retriever bench test"
usage() { echo "usage: bash run.sh WORD [flags], where WORD is one of: $words" >&2; exit 2; }

word=${1:-}
case " $words " in *" $word "*) [ -n "$word" ] || usage;; *) [ -z "$word" ] || echo "run.sh: '$word' is no command" >&2; usage;; esac
shift

# Python 3.11 or newer: the first that qualifies
new_enough='import sys; sys.exit(sys.version_info < (3, 11))'
python=""
for candidate in ${WHALE_PYTHON:-} python3 python3.13 python3.12 python3.11; do
  if command -v "$candidate" >/dev/null 2>&1 && "$candidate" -c "$new_enough" >/dev/null 2>&1; then python=$candidate; break; fi
done
[ -n "$python" ] || { echo "run.sh: WHALE needs Python 3.11 or newer on PATH (or WHALE_PYTHON=/path/to/python3); found: $(python3 --version 2>&1 || true)" >&2; exit 1; }

# .venv, once for each state of requirements.txt; the stamp is written last
stamp=$root/.venv/requirements.installed
if ! cmp -s "$root/requirements.txt" "$stamp"; then
  [ ! -L "$root/.venv" ] || { echo "run.sh: $root/.venv is a link to an environment that was made for other requirements; it is not touched: remove the link" >&2; exit 1; }
  echo "setting up $root/.venv (once, one to three minutes: torch is large)"
  "$python" -m venv --clear "$root/.venv"
  "$root/.venv/bin/python" -m pip install --quiet --disable-pip-version-check -r "$root/requirements.txt"
  cp "$root/requirements.txt" "$stamp"
fi

export TOKENIZERS_PARALLELISM=false
export GOMP_SPINCOUNT=${GOMP_SPINCOUNT:-2000}       # idle torch threads soon sleep: the sandbox uses the same cores
case $word in
  test) cd "$root" && exec "$root/.venv/bin/python" -m pytest "$@" ;;
  *) exec "$root/.venv/bin/python" "$root/cli.py" "$word" "$@" ;;
esac
