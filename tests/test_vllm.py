"""vLLM itself, on a CPU: processes that die, fall silent or lose their host; weights that do not arrive; whole runs; a model of
Qwen3.5's architecture; an exported folder. `bash run.sh test-vllm` makes an environment that has it."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

import vllm_engine
from config import ROOT
from engine import EngineDied, SamplingParams, load_model, untied_weights
from servers import MODEL
from envs import MathEnv
from small import SMALL, call, rows, start
from test_engines import drain, greedy, random_prompts
from test_ranks import finish, launch
from vllm_engine import Read, VllmEngine, make_folder, sum_bits, visible_gpus
from whale import sample_tasks

TORCHVISION = Path(sys.prefix) / "torchvision-apart"            # run.sh: it does not import beside the CPU build as it is


@pytest.fixture
def engine():
    """To be killed; where a test does not, it may have `shared`."""
    engine = VllmEngine(MODEL, n_rows=8, max_len=256, device="cpu")
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def shared():
    """In bf16, in which a CPU's kernels repack more than in fp32."""
    engine = VllmEngine(MODEL, n_rows=8, max_len=256, device="cpu", dtype=torch.bfloat16)
    yield engine
    engine.close()


def workers() -> set[int]:
    """Engine processes on this machine."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if b"vllm_engine.py" in path.read_bytes() and (path.parent / "stat").read_text().rpartition(")")[2].split()[0] != "Z":
                found.add(int(path.parent.name))
        except OSError:
            continue
    return found


def folders() -> set[Path]:
    return set(Path("/dev/shm").glob("whale-engine-*"))


def gone(pids: set[int], limit_s: float = 20) -> bool:
    give_up = time.monotonic() + limit_s
    while workers() & pids and time.monotonic() < give_up:
        time.sleep(0.1)
    return not workers() & pids


def ask_much(engine) -> None:
    for i in range(200):
        engine.submit(i, [5, 6, 7 + i], SamplingParams(max_tokens=240, seed=i, top_k=0))


@pytest.mark.needs_vllm
def test_a_killed_engine_is_an_error_at_once(engine):
    ask_much(engine)
    engine.step()
    started = time.monotonic()
    os.kill(engine._process.pid, signal.SIGKILL)
    with pytest.raises(EngineDied, match="the vLLM engine is gone: its process ended with code -9"):
        drain(engine)
    assert time.monotonic() - started < 10


@pytest.mark.needs_vllm
def test_a_silent_engine_is_an_error_in_time(engine, monkeypatch):
    """Stopped in the middle of its work, with a pipe that is full."""
    monkeypatch.setattr(vllm_engine, "SILENCE_S", 3)
    ask_much(engine)
    os.kill(engine._process.pid, signal.SIGSTOP)
    for i in range(300):
        engine.submit(1000 + i, [5] * 250, SamplingParams(max_tokens=1, seed=0))
    started = time.monotonic()
    with pytest.raises(EngineDied, match="no sign of life for 3 s"):
        drain(engine)
    assert time.monotonic() - started < 20 and engine._process.poll() is not None


@pytest.mark.needs_vllm
def test_an_idle_engine_may_be_silent(shared, monkeypatch):
    monkeypatch.setattr(vllm_engine, "SILENCE_S", 2)
    time.sleep(3)
    shared.submit(0, [5, 6, 7], SamplingParams(max_tokens=3, seed=0))
    assert drain(shared)[0].ids


@pytest.mark.needs_vllm
def test_what_goes_wrong_inside_is_told(engine):
    engine._outbox.put(("submit", "x", [5], {"temperature": -1.0}))
    engine._running.add("x")
    with pytest.raises(EngineDied, match="temperature"):
        drain(engine)


@pytest.mark.needs_vllm
def test_close_leaves_no_process_and_no_folder():
    before, kept = workers(), folders()
    engine = VllmEngine(MODEL, n_rows=8, max_len=256, device="cpu")
    assert len(workers() - before) == 1 and len(folders() - kept) == 1
    assert not (engine.folder / "base/model.safetensors").exists()
    ask_much(engine)
    engine.close()
    engine.close()
    assert workers() == before and folders() <= kept


@pytest.mark.needs_vllm
def test_weights_that_do_not_arrive_are_found_out(shared):
    """The reload is left out; and a weight that differs in its last bit is told from all others, wherever vLLM keeps it."""
    new = {name: (tensor * 1.01).to(torch.bfloat16) for name, tensor in untied_weights(load_model(MODEL)).items()}
    shapes, ask = {name: tuple(tensor.shape) for name, tensor in new.items()}, shared._ask
    shared._ask = lambda kind, *rest, **limits: None if kind == "load" else ask(kind, *rest, **limits)
    with pytest.raises(EngineDied, match="does not hold the weights"):
        shared.load_weights(new.items(), 1)
    shared._ask = ask
    shared.load_weights(new.items(), 2)
    (held,) = shared._ask("read", shapes)
    assert {name for parts in held for name in parts} == new.keys() and all(isinstance(one, list) for one in held.values())
    for name in ("model.layers.1.self_attn.k_proj.weight", "model.layers.0.mlp.up_proj.weight", "model.embed_tokens.weight",
                 "model.layers.2.self_attn.o_proj.weight", "model.norm.weight"):
        changed = {n: tensor.clone() for n, tensor in new.items()}
        changed[name].view(-1).view(torch.int16)[-1] ^= 1
        shared.load_weights(changed.items(), 3)
        (other,) = shared._ask("read", shapes)
        (parts,) = [parts for parts in held if held[parts] != other[parts]]
        assert [part for part, a, b in zip(parts, held[parts], other[parts], strict=True) if a != b] == [name]
        with pytest.raises(EngineDied, match=name):
            shared._prove(new)


@pytest.mark.needs_vllm
def test_a_tied_head_follows_the_embedding(shared):
    """In bf16, a reload alone leaves the repacked head as it was, and the replies would be the old head's."""
    torch.manual_seed(0)
    reference = load_model(MODEL, torch.bfloat16)
    new = {name: tensor + 0.02 * torch.randn(tensor.shape) * ("embed" in name) for name, tensor in untied_weights(reference).items()}
    shared.load_weights(new.items(), 4)
    reference.load_state_dict({name: tensor.to(torch.bfloat16) for name, tensor in new.items()}, strict=False)
    assert agreement(shared, reference) >= 0.7


HOST = """
import sys, time
sys.path.insert(0, {root!r})
from engine import SamplingParams
from vllm_engine import VllmEngine
if __name__ == "__main__":
    engine = VllmEngine({model!r}, n_rows=8, max_len=256, device="cpu")
    for i in range(5000):
        engine.submit(i, [5, 6, 7], SamplingParams(max_tokens=200, seed=i))
    print("ready", flush=True)
    while True:
        engine.step()
"""


@pytest.mark.needs_vllm
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_no_engine_outlives_its_host(tmp_path, end):
    script = tmp_path / "host.py"
    script.write_text(HOST.format(root=str(ROOT), model=MODEL))
    before, kept = workers(), folders()
    host = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert host.stdout.readline() == "ready\n"
    ours = workers() - before
    assert len(ours) == 1
    host.send_signal(end)
    host.wait()
    assert gone(ours)
    if left := folders() - kept:                                # a killed host cannot tidy up: the next one does
        VllmEngine(MODEL, n_rows=8, max_len=256, device="cpu").close()
        assert not folders() & left


@pytest.mark.needs_vllm
def test_an_engine_that_is_killed_in_a_run(tmp_path):
    """A clear message, exit 1, no process left; the same command goes on to the end."""
    args = ["math", *SMALL, "--engine", "vllm", "--n-eval", 8, "--out", tmp_path, "--name", "run"]
    before = workers()
    process = start(*args)
    metrics = tmp_path / "run/metrics.jsonl"
    while not metrics.exists() or "weight_step" not in metrics.read_text():
        assert process.poll() is None
        time.sleep(0.05)
    (worker,) = workers() - before
    os.kill(worker, signal.SIGKILL)
    started = time.monotonic()
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1 and time.monotonic() - started < 30, output
    assert "the vLLM engine is gone" in output and "Traceback" not in output and "The same command goes on" in output, output
    assert gone({worker}) and workers() == before
    code, output = call(*args)
    assert code == 0 and "resumed after weight step 1" in output
    steps = [row["step"] for row in rows(tmp_path / "run") if row["kind"] == "weight_step"]
    assert steps == [1, 2] and json.loads((tmp_path / "run/summary.json").read_text())["complete"]


@pytest.mark.needs_vllm
def test_the_whole_loop(tmp_path):
    """`bash run.sh math --engine vllm`: one cycle at its full size, learning as the transformers engine does."""
    code, output = call("math", "--engine", "vllm", "--cycles", 1, "--out", tmp_path, "--name", "run")
    assert code == 0, output
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["final_mean8"]["mean"] > summary["base_mean8"]["mean"] + 0.2
    steps = [row for row in rows(tmp_path / "run") if row["kind"] == "weight_step"]
    assert [row["step"] for row in steps] == list(range(1, len(steps) + 1))
    shown = {json.loads(line)["task_id"] for line in (tmp_path / "run/rollouts/step_000001.jsonl").read_text().splitlines()}
    train = MathEnv().load(ROOT / "embedded/math/train.jsonl")
    assert shown <= {task.id for task in sample_tasks(train, 0, 0, 32)}                     # the tasks are those of any engine


@pytest.mark.needs_vllm
def test_an_exported_folder_is_served(finished, tmp_path):
    """In bf16, with the run's chat template; greedy as transformers has it."""
    assert call("export", finished, "--out", tmp_path / "agent")[0] == 0
    engine = VllmEngine(str(tmp_path / "agent"), n_rows=8, max_len=256, device="cpu", dtype=torch.bfloat16)
    try:
        assert engine.tokenizer.chat_template
        assert agreement(engine, load_model(tmp_path / "agent", torch.bfloat16)) >= 0.7        # bf16: ties fall either way
    finally:
        engine.close()
    script = ("import sys; from vllm import LLM, SamplingParams\n"
              "if __name__ == '__main__':\n"
              "    llm = LLM(sys.argv[1], enforce_eager=True, max_model_len=256, kv_cache_memory_bytes=1 << 28)\n"
              "    print('SAID', llm.chat([{'role': 'user', 'content': 'What is 2 + 3?'}], SamplingParams(max_tokens=8))[0].outputs[0])")
    (tmp_path / "serve.py").write_text(script)
    said = subprocess.run([sys.executable, str(tmp_path / "serve.py"), str(tmp_path / "agent")], capture_output=True, text=True)
    assert "SAID CompletionOutput" in said.stdout, said.stderr[-2000:]


def agreement(engine, reference) -> float:
    prompts = random_prompts(20)
    for i, prompt in enumerate(prompts):
        engine.submit(i, prompt, SamplingParams(max_tokens=8, seed=i, temperature=0))
    done = drain(engine)
    return sum(done[i].ids == greedy(reference, prompt, 8, engine.stop_ids) for i, prompt in enumerate(prompts)) / len(prompts)


@pytest.mark.needs_vllm
@pytest.mark.skipif(not TORCHVISION.exists(), reason="no torchvision beside this environment")
def test_qwen35_is_served(tmp_path, monkeypatch):
    """A tiny random vision-language model of Qwen3.5: its text model is served, and new weights arrive."""
    from test_export import tiny_vision_language_model

    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parent / 'torchvision_on_cpu'}:{TORCHVISION}")
    tiny_vision_language_model(tmp_path / "vl", tied=True, head_dim=32, linear_head_dim=128)
    reference = load_model(tmp_path / "vl", torch.bfloat16)
    engine = VllmEngine(str(tmp_path / "vl"), n_rows=16, max_len=256, device="cpu", dtype=torch.bfloat16)
    try:
        assert agreement(engine, reference) >= 0.7
        torch.manual_seed(0)
        new = {name: tensor + 0.05 * torch.randn(tensor.shape) for name, tensor in untied_weights(reference).items()}
        engine.load_weights(new.items(), 1)
        reference.load_state_dict({name: tensor.to(torch.bfloat16) for name, tensor in new.items()}, strict=False)
        assert agreement(engine, reference) >= 0.7
    finally:
        engine.close()


@pytest.fixture(scope="module")
def two_heads(tmp_path_factory) -> Path:
    """A tiny random Qwen3 whose key/value heads two GPUs can share, with a head of its own and padding in its vocabulary."""
    folder = tmp_path_factory.mktemp("two_heads")
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(
        vocab_size=1000, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, max_position_embeddings=1024, eos_token_id=2, tie_word_embeddings=False)).save_pretrained(folder)
    AutoTokenizer.from_pretrained(MODEL).save_pretrained(folder)
    return folder


@pytest.mark.needs_vllm
def test_an_engine_of_two_processes(two_heads, monkeypatch):
    """--tp 2: weights are split, arrive, are proved by the sums of their bits; a bit that differs is seen; all ends together."""
    engine = VllmEngine(str(two_heads), n_rows=16, max_len=256, device="cpu", tp=2)
    family = {int(path.parent.name) for path in Path("/proc").glob("[0-9]*/stat") if group_of(path) == engine._process.pid}
    try:
        assert len(family) >= 3
        reference = load_model(two_heads)
        new = {name: tensor + 0.02 * torch.randn(tensor.shape) for name, tensor in untied_weights(reference).items()}
        engine.load_weights(new.items(), 1)
        reference.load_state_dict(new)
        assert agreement(engine, reference) >= 0.9
        for name in ("model.layers.1.self_attn.v_proj.weight", "lm_head.weight", "model.layers.0.mlp.down_proj.weight", "model.norm.weight"):
            changed = {n: tensor.clone() for n, tensor in new.items()}
            changed[name].view(-1).view(torch.int32)[-1] ^= 1
            with pytest.raises(EngineDied, match=name):
                engine._prove(changed)
    finally:
        engine.close()
    give_up = time.monotonic() + 10
    while left := {pid for pid in family if Path(f"/proc/{pid}").exists()}:
        assert time.monotonic() < give_up, left
        time.sleep(0.1)


def group_of(stat: Path) -> int:
    try:
        return int(stat.read_text().rpartition(")")[2].split()[2])
    except OSError:
        return 0


@pytest.mark.needs_vllm
@pytest.mark.parametrize("tp", [1, 2])
def test_ranks_with_vllm(two_heads, tmp_path, tp):
    """Two ranks with an engine each, which learn; or with one in common, where no update happens (a random model solves nothing)."""
    model = ["--model", two_heads, "--max-assistant-tok", 8] if tp == 2 else []
    args = ["math", *SMALL, "--engine", "vllm", "--method", "weight", "--rollouts", 256, "--tp", tp, *model, "--out", tmp_path, "--name", "run"]
    before = workers()
    code, output = finish(launch(ROOT / "cli.py", *args), timeout=200)
    assert code == 0, output
    steps = [row for row in rows(tmp_path / "run") if row["kind"] == "weight_step"]
    assert [row["version"] for row in steps] == ([1, 2] if tp == 1 else [0, 0])
    assert f"2 ranks, {2 // tp} engines" in output and workers() == before


# ---- without vLLM ---------------------------------------------------------------------------------------------------


def fake_model(gate_up: torch.Tensor, down: torch.Tensor, norm: torch.Tensor) -> torch.nn.Module:
    """A layer as vLLM names it, on one GPU of several."""
    model = torch.nn.Module()
    model.packed_modules_mapping = {"gate_up_proj": ["gate_proj", "up_proj"]}
    for name, weight in (("gate_up_proj", gate_up), ("down_proj", down), ("norm", norm)):
        model.add_module(name, torch.nn.Module())
        model.get_submodule(name).weight = torch.nn.Parameter(weight)
    return model


def test_weights_that_are_split_among_gpus_are_summed():
    """Two GPUs, each with half of the rows of gate and up, and half of the columns of down."""
    gate, up, down, norm = torch.randn(8, 4), torch.randn(8, 4), torch.randn(4, 8), torch.randn(4)
    shapes = {"gate_proj.weight": (8, 4), "up_proj.weight": (8, 4), "down_proj.weight": (4, 8), "norm.weight": (4,)}
    reports = [Read(shapes)(fake_model(torch.cat([gate[i:i + 4], up[i:i + 4]]), down[:, i:i + 4], norm)) for i in (0, 4)]
    (together,) = [parts for parts in reports[0] if len(parts) == 2]
    assert together == ("gate_proj.weight", "up_proj.weight") and sum(r[together] for r in reports) == sum_bits(gate) + sum_bits(up)
    assert sum(report[("down_proj.weight",)] for report in reports) == sum_bits(down)
    assert isinstance(reports[0][("norm.weight",)], list) and reports[0][("norm.weight",)] == reports[1][("norm.weight",)]
    whole = Read(shapes)(fake_model(torch.cat([gate, up]), down, norm))
    assert all(isinstance(one, list) for one in whole.values()) and len(whole[together]) == 2


def test_an_engine_sees_the_gpus_of_its_rank(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert [visible_gpus(device, tp) for device, tp in (("cuda", 1), ("cuda:2", 1), ("cuda:2", 2), ("cuda", 4))] == ["4", "6", "6,7", "4,5,6,7"]


def make_folders(n: int) -> int:
    """Makes folders and takes them down, with other processes at it -> how many were gone in between."""
    lost = 0
    for _ in range(n):
        folder, lock = make_folder(0)
        (folder / "base").mkdir()
        time.sleep(0.001)
        lost += not (folder / "base").exists() or not (folder / "lock").exists()
        shutil.rmtree(folder, ignore_errors=True)
        lock.close()
    return lost


def test_folders_are_made_by_many_processes_at_once():
    with ProcessPoolExecutor(4) as pool:
        assert sum(pool.map(make_folders, [30] * 4)) == 0


def test_a_full_shared_memory_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setattr(vllm_engine.tempfile, "tempdir", str(tmp_path))
    folder, lock = make_folder(1 << 50)
    assert folder.parent == tmp_path
    lock.close()
