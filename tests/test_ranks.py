"""Several ranks, as torchrun starts them, on the CPU: the same update as one rank, the same run, and how they end."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from config import ROOT
from on_ranks import N_STEPS, STEPS, stats_of
from ranks import launch as launch_here
from rft import Trainer, split_by_load
from small import SMALL, call, rows, start
from test_rft import batch, flat, make_tokenizer, qwen3, qwen3_5

MODELS = {"qwen3": qwen3, "qwen3_untied": lambda: qwen3(tied=False), "qwen3_5": qwen3_5}


def launch(*words, nodes=("--standalone",), n=2) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, str(ROOT / "ranks.py"), *nodes, "--nproc-per-node", str(n), *map(str, words)],
                            text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                            env={**os.environ, "PYTHONPATH": str(ROOT)})


def finish(process: subprocess.Popen, timeout=240) -> tuple[int, str]:
    """-> exit code, all that it printed."""
    try:
        output, _ = process.communicate(timeout=timeout)
    finally:
        process.kill()                                              # and its ranks with it
    return process.returncode, output


def descendants(pid: int) -> list[int]:
    children = [int(line) for task in Path(f"/proc/{pid}/task").iterdir() for line in (task / "children").read_text().split()]
    return children + [other for child in children for other in descendants(child)]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition, process: subprocess.Popen, timeout=240) -> None:
    deadline = time.monotonic() + timeout
    while not condition() and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)


# --- the trainer ---


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[Path, dict]:
    """Models; a checkpoint of each by one rank (NAME-1); what two ranks did with them, and their checkpoints."""
    folder = tmp_path_factory.mktemp("trained")
    for name, build in MODELS.items():
        torch.manual_seed(0)
        build().save_pretrained(folder / "models" / name)
        trainer = Trainer(folder / "models" / name, STEPS, "cpu")
        stats_of(trainer)
        trainer.save(folder / f"{name}-1", make_tokenizer())
    code, output = finish(launch(ROOT / "tests/on_ranks.py", "train", folder))
    assert code == 0, output
    return folder, json.loads((folder / "found.json").read_text())


@pytest.mark.parametrize("model", MODELS)
def test_two_ranks_train_as_one(trained, model):
    """Losses, norms and weights after three steps of three minibatches, the last of which is one trajectory."""
    folder, found = trained
    (n_passes, *_), (n_others, *_) = found[model]["passes"]
    n_empty = [n for _, n in found[model]["passes"]]
    assert n_passes == n_others and max(n_empty) > 1, "passes of a rank that has fewer micro-batches are part of the test"
    trainer = Trainer(folder / "models" / model, STEPS, "cpu")
    for mine, theirs in zip(stats_of(trainer), found[model]["stats"], strict=True):
        assert theirs["loss"] == pytest.approx(mine["loss"], abs=1e-5)
        assert theirs["grad_norm"] == pytest.approx(mine["grad_norm"], abs=1e-5) and mine["grad_norm"] > 2 * STEPS.max_grad_norm
        for key in ("n_updates", "n_trajectories", "n_seq", "n_supervised_tok", "n_tok"):
            assert theirs[key] == mine[key]
    ours, theirs = (load_file(folder / f"{model}-{n}" / "model.safetensors") for n in (1, 2))
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        difference = (tensor - theirs[name]).abs()                  # where a gradient is about 0, rounding decides its sign
        assert (difference < 2e-6).float().mean() > 0.98 and difference.max() < STEPS.lr / 10, name
    assert found[model]["names"] == [name for name, _ in trainer.weights()]


@pytest.mark.parametrize("model", MODELS)
def test_all_ranks_hold_the_same(trained, model):
    folder, found = trained
    restored = Trainer(folder / f"{model}-2", STEPS, "cpu")
    assert found[model]["checksums"] == [restored.checksum()] * 2
    assert found[model]["empty"] == [0, True], "nothing accepted, no update on any rank"


@pytest.mark.parametrize("model", MODELS)
def test_a_checkpoint_of_two_ranks_goes_on_on_one_and_the_reverse(trained, model):
    """Bit for bit: what was loaded by another number of ranks is saved as the same bytes."""
    folder, found = trained
    for made, n_files in ((f"{model}-1", 1), (f"{model}-2", 2)):
        files = {path.name: path.read_bytes() for path in (folder / made).iterdir()}
        again = folder / f"{model}-{n_files}-{3 - n_files}"
        if n_files == 2:                                            # the other way was done by the two ranks
            trainer = Trainer(folder / "models" / model, STEPS, "cpu")
            stats_of(trainer, 5)
            trainer.load(folder / made)
            trainer.save(again, make_tokenizer())
        assert {path.name: path.read_bytes() for path in again.iterdir()} == files
    trainer = Trainer(folder / "models" / model, STEPS, "cpu")
    trainer.load(folder / f"{model}-1")
    for mine, theirs in zip(stats_of(trainer, N_STEPS), found[model]["resumed"], strict=True):
        assert theirs["loss"] == pytest.approx(mine["loss"], abs=1e-5)


@pytest.mark.parametrize("model", MODELS)
def test_bf16_compute_has_fp32_masters_and_near_losses(trained, model):
    _, found = trained
    assert set(found[model]["dtypes"]) == {"torch.float32"}
    for half, exact in zip(found[model]["bf16"], found[model]["stats"], strict=True):
        assert half["loss"] == pytest.approx(exact["loss"], rel=0.02) and half["loss"] != exact["loss"]


@pytest.mark.parametrize("model", MODELS)
def test_gradient_checkpointing_on_ranks_changes_nothing(trained, model):
    _, found = trained
    for one, other in zip(found[model]["recomputing"], found[model]["stats"], strict=True):
        assert one["loss"] == pytest.approx(other["loss"], abs=1e-6) and one["grad_norm"] == pytest.approx(other["grad_norm"], abs=1e-6)


def test_a_gradient_that_is_not_finite_on_one_rank_stops_all(trained):
    said, unchanged = trained[1]["broken"]
    assert len(said) == 2 and all("non-finite" in text for text in said) and unchanged


def test_shares_are_balanced_and_hold_each_sequence_once():
    sequences = flat(batch(seed=3, n=40))
    for n in (1, 2, 3, 8, 50):
        shares = split_by_load(sequences, n)
        assert len(shares) == n and sorted(s.ids for share in shares for s in share) == sorted(s.ids for s in sequences)
        loads = [sum(len(s.ids) for s in share) for share in shares]
        assert max(loads) - min(loads) <= max(len(s.ids) for s in sequences)


# --- a whole run ---


def has_trained(folder: Path) -> bool:
    """Whether its first weight step is done."""
    return (folder / "state.json").exists() and json.loads((folder / "state.json").read_text())["weight_step"] == 1


@pytest.mark.slow
def test_a_run_of_one_rank_goes_on_on_two(finished, tmp_path):
    """The harness phase is shared; rank 0 alone proposes, gates, writes and prints; all as one rank would have done it."""
    flags = ["math", *SMALL, "--out", tmp_path, "--name", "run"]
    process = start(*flags)
    wait_until(lambda: has_trained(tmp_path / "run"), process)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    code, output = finish(launch(ROOT / "tests/on_ranks.py", "watch", tmp_path, *flags))
    assert code == 0, output
    assert_same_run(tmp_path / "run", finished)
    asked = [[json.loads(line) for line in (tmp_path / f"rank_{rank}.jsonl").read_text().splitlines()] for rank in (0, 1)]
    together = [[row for row in of_rank if "gate" not in row["seed"]] for of_rank in asked]
    assert together[1] == asked[1] and len(together[0]) == len(together[1]), "gates are rank 0's"
    scored = 0
    for mine, theirs in zip(*together, strict=True):
        assert (mine["seed"], mine["source"], mine["n"]) == (theirs["seed"], theirs["source"], theirs["n"])
        assert not set(mine["tasks"]) & set(theirs["tasks"]) and len(mine["tasks"]) == len(theirs["tasks"])
        scored += mine["seed"][-1] == "score" and len(mine["tasks"]) == 12                # of 24
    assert scored == len(list((tmp_path / "run").glob("harness/cycle_01/*/score.json"))) >= 2
    lines = (tmp_path / "run/log.txt").read_text().splitlines()
    after = lines[lines.index("resumed after weight step 1, in phase 1"):]
    assert len(after) > 8 and all(output.splitlines().count(line) == after.count(line) for line in after)


def test_a_killed_rank_ends_all_and_the_run_goes_on_on_one(finished, tmp_path):
    flags = ["math", *SMALL, "--out", tmp_path, "--name", "run"]
    process = launch(ROOT / "cli.py", *flags)
    wait_until(lambda: has_trained(tmp_path / "run"), process)
    below = descendants(process.pid)
    ranks = [pid for pid in below if b"cli.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]       # as they were started
    assert len(ranks) == 2 and len(below) >= 4, "two ranks, each with its sandbox"
    os.kill(ranks[1], signal.SIGKILL)
    killed_at = time.monotonic()
    code, output = finish(process)
    assert time.monotonic() - killed_at < 20 and code == 137
    assert "rank 1 was ended by SIGKILL" in output and "Traceback" not in output
    assert_gone(below)
    code, output = call(*flags)
    assert code == 0, output
    assert_same_run(tmp_path / "run", finished)


def test_no_rank_outlives_the_launcher(tmp_path):
    process = launch(ROOT / "cli.py", "math", *SMALL, "--out", tmp_path, "--name", "run")
    wait_until((tmp_path / "run/final_harness.py").exists, process)
    below = descendants(process.pid)
    process.kill()
    process.wait()                                                  # and not for the ranks, which hold its output
    assert len(below) >= 4
    assert_gone(below)
    process.stdout.close()


def assert_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 5
    while any(map(is_alive, pids)):
        assert time.monotonic() < deadline, "a child is left"
        time.sleep(0.05)


def assert_same_run(folder: Path, other: Path) -> None:
    """The rows of metrics.jsonl, where other micro-batches or other sums may change the last digits only."""
    assert [row.keys() for row in rows(folder)] == [row.keys() for row in rows(other)]
    for row, expected in zip(rows(folder), rows(other), strict=True):
        for key in row.keys() - {"padding_frac"}:
            close = isinstance(expected[key], float)
            assert row[key] == (pytest.approx(expected[key], abs=1e-5) if close else expected[key]), (row["kind"], key)
    assert (folder / "final_harness.py").read_text() == (other / "final_harness.py").read_text()
    assert [path.name for path in (folder / "weights").iterdir()] == [path.name for path in (other / "weights").iterdir()]


# --- how it ends ---


@pytest.mark.parametrize("case, said", [("fail", "run.sh: rank 1: planted"), ("fail-unknown", "KeyError: 'planted'")])
def test_a_rank_that_fails_ends_all_with_its_message(tmp_path, case, said):
    process = launch(ROOT / "tests/on_ranks.py", case, tmp_path, "math", *SMALL, "--out", tmp_path, "--name", "run")
    code, output = finish(process, timeout=120)
    assert code == 1 and said in output and ("Traceback" in output) == (case == "fail-unknown"), output
    assert "[rank0]" not in output and "ChildFailedError" not in output


def test_a_rank_that_fails_ends_the_other_machine_too(tmp_path):
    """Two launchers, as on two machines; the rank of the second fails."""
    processes = []
    for node in (0, 1):
        nodes = ("--nnodes", "2", "--node-rank", str(node), "--master-addr", "127.0.0.1", "--master-port", "29637")
        processes.append(launch(ROOT / "tests/on_ranks.py", "fail", tmp_path, "math", *SMALL, "--out", tmp_path, nodes=nodes, n=1))
    (first, other), (second, output) = (finish(process, timeout=120) for process in processes)
    assert first != 0 and second == 1 and "run.sh: rank 1: planted" in output and "Traceback" not in other + output


@pytest.mark.parametrize("flags, said, expected", [(["--epochs", "0.0001"], "run.sh: --epochs", 2), (["--help"], "usage: ", 0)])
def test_a_bad_request_is_said_once(tmp_path, flags, said, expected):
    code, output = finish(launch(ROOT / "cli.py", "math", *flags, "--out", tmp_path), timeout=120)
    assert code == expected and output.count(said) == 1
    assert "Traceback" not in output and "torch/distributed" not in output and not list(tmp_path.iterdir())


# --- run.sh ---


@pytest.mark.parametrize("words, environment, expected", [
    ("math", {}, "cli.py math"),
    ("math --preset paper", {}, "ranks.py --standalone --nproc-per-node 3 cli.py math --preset paper"),
    ("math --preset paper --device cpu", {}, "cli.py math --preset paper --device cpu"),
    ("math --device=cuda", {"CUDA_VISIBLE_DEVICES": "4,6"}, "ranks.py --standalone --nproc-per-node 2 cli.py math --device=cuda"),
    ("math --device cuda", {"CUDA_VISIBLE_DEVICES": "5"}, "cli.py math --device cuda"),
    ("math --device cuda", {"CUDA_VISIBLE_DEVICES": ""}, "cli.py math --device cuda"),
    ("chess", {"WHALE_RANKS": "2"}, "ranks.py --standalone --nproc-per-node 2 cli.py chess"),
    ("eval math --preset paper", {}, "cli.py eval math --preset paper"),
    ("math --preset paper", {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "a"}, "ranks.py --nnodes 2 --node-rank 1 --master-addr a "
     "--master-port 29500 --nproc-per-node 3 cli.py math --preset paper"),
    ("math", {"NNODES": "2", "NODE_RANK": "1"}, None),
    ("math", {"WHALE_RANKS": "many"}, None),
])
def test_run_sh_starts_a_rank_a_visible_gpu(tmp_path, words, environment, expected):
    done = run_stand_ins(tmp_path, "run.sh", words, environment)
    if expected is None:
        assert done.returncode != 0 and ("MASTER_ADDR" in done.stderr or "WHALE_RANKS 'many'" in done.stderr)
    else:
        assert done.stdout.replace(f"{tmp_path}/", "").strip() == expected


def test_slurm_starts_run_sh_once_a_machine(tmp_path):
    done = run_stand_ins(tmp_path, "slurm.sh", "math --preset paper", {
        "SLURM_NNODES": "2", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_SUBMIT_DIR": str(tmp_path)})
    assert done.stdout.replace(f"{tmp_path}/", "").splitlines() == [
        f"ranks.py --nnodes 2 --node-rank {n} --master-addr n1 --master-port 20007 --nproc-per-node 3 cli.py math --preset paper" for n in (0, 1)]


def run_stand_ins(folder: Path, script: str, words: str, environment: dict[str, str]) -> subprocess.CompletedProcess:
    """A shell script of ours with stand-ins for .venv's python, which says what it is asked, for nvidia-smi, which sees
    three GPUs, and for a SLURM of two machines."""
    checksum = subprocess.run(["cksum"], stdin=open(ROOT / "requirements.txt"), capture_output=True, text=True).stdout.split()[0]
    with_vllm = f"envs/vllm-{checksum}"                         # where --preset paper looks for its environment
    for path, text in ((".venv/bin/python", 'echo "$@"'), (f"{with_vllm}/bin/python", 'echo "$@"'), ("bin/nvidia-smi", 'printf "GPU %d: H200\\n" 0 1 2'),
                       ("bin/srun", 'shift 2; SLURM_NODEID=0 "$@"; SLURM_NODEID=1 "$@"'), ("bin/scontrol", 'printf "n1\\nn2\\n"')):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(f"#!/bin/sh\n{text}\n")
        (folder / path).chmod(0o755)
    for name, target in (("run.sh", "run.sh"), ("slurm.sh", "slurm.sh"), ("requirements.txt", "requirements.txt"),
                         ("requirements.txt", ".venv/requirements.installed"),
                         ("requirements.txt", f"{with_vllm}/requirements.installed")):
        shutil.copy(ROOT / name, folder / target)
    inherited = {key: value for key, value in os.environ.items() if key not in ("CUDA_VISIBLE_DEVICES", "WHALE_RANKS", "NNODES")}
    return subprocess.run(["bash", str(folder / script), *words.split()], capture_output=True, text=True, env={
        **inherited, "WHALE_PYTHON": sys.executable, "WHALE_ENVS": f"{folder}/envs", "PATH": f"{folder}/bin:{os.environ['PATH']}", **environment})


def test_a_signal_that_is_ignored_stays_so(monkeypatch):
    """nohup: torchrun would listen all the same."""
    heard = []
    monkeypatch.setattr("torch.distributed.run.run", lambda args: heard.append(args.signals_to_handle))
    monkeypatch.setattr(signal, "getsignal", lambda number: signal.SIG_IGN if number == signal.SIGHUP else signal.SIG_DFL)
    assert launch_here(["--nproc-per-node", "2", "program.py"]) == 0
    assert heard == ["SIGTERM,SIGINT,SIGQUIT"]
