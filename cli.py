"""The command line that `bash run.sh` hands over to: the runs, and the small commands that use one part alone.

    math | search | chess [flags]                    a run (whale.py); the same command again resumes it
    search-harness math [flags]                      a run that searches a harness once and trains nothing
    eval math --harness FILE --model DIR             mean@n of one harness and one model on one split
    check-harness math FILE                          the gates and probes on one harness file
    sandbox FILE.py [--seconds 2 --mb 256]           one snippet as the Python tool runs it
    verify math --cases FILE.jsonl                   verdicts on a file of cases
    verify math --reply-file F --reference R         one verdict, and why (chess: --fen F)
    compare math --methods whale,weight --seeds 3    several methods or schedules on the same seeds (compare.py)
    report RUN                                       rebuilds report.html of a run or of a comparison (report.py)
    data math --out DIR                              the paper's splits, from the hub or from files (data.py)
    retriever --corpus FILE --index DIR              a search server (retriever.py)
    bench [--only rollouts,training]                 ratios to the same work done bare (bench.py)
"""

import stop

if __name__ == "__main__":
    stop.listen()                       # before the imports that take seconds

import argparse
import hashlib
import inspect
import json
import os
import re
import shutil
import signal
import sys
from contextlib import closing
from dataclasses import Field, asdict, fields
from pathlib import Path

import torch

import bench
import compare
import data
import export
import gpu_check
import report
import retriever
import rollout
from agent_cmd import LAYER as AGENT_LAYER
from arms import ArmFailed
from config import (
    BOUNDS, CHOICES, DOMAIN_PRESETS, PRESETS, ROOT, Config, check_urls, describe_model, load_splits, pin_model,
    read_file, rollout_config, train_config)
from costs import check_costs
from engine import EngineDied, ModelError, locate
from envs import ENVS, verify_cases
from tasks import DataError, Row
from gates import check_harness
from harness_search import SearchError
from jail import LAYERS
from keys import HTTPS, leave_no_core
from lint import ForbiddenText, parse_harness
from ranks import ALONE, Ranks, open_ranks
from rft import TrainError
from retriever import RetrieverDown
from rollout import InfraError
from files import UsageError, read_sealed, write_atomically
from sandbox import Limits, Sandbox, SandboxUnavailable, run_snippet
from screen import UNSAFE, Screen, plain
from track import TrackerError
from search_answer import JudgeDown
from search_index import RetrieverError
from stats import bootstrap_ci
from team import follow, open_engine
from whale import Run, task_means, train_whale

EXIT_REFUSED, EXIT_USAGE = 1, 2


def add_config_flags(parser: argparse.ArgumentParser, domain: str | None = None) -> None:
    """One flag a field of Config; a flag that is not given keeps the preset's value."""
    meanings = dict(re.findall(r"^    (\w+): .*?  # (.*)$", inspect.getsource(Config), re.MULTILINE))
    for knob in fields(Config):
        if knob.name == "domain":
            if domain is None:
                parser.add_argument("domain", choices=CHOICES["domain"])
            continue
        kind = {"int": int, "float": float, "str": str, "bool": parse_bool}[getattr(knob.type, "__name__", knob.type)]
        says = [meanings.get(knob.name, ""), *(f"{name}: {value}" for name, value in preset_values(knob).items())]
        parser.add_argument("--" + knob.name.replace("_", "-"), type=kind, default=None, choices=CHOICES.get(knob.name),
                            help="; ".join(filter(None, says)).replace("%", "%%"))


def preset_values(knob: Field) -> dict[str, object]:
    """A knob's value in each preset, and where a domain differs."""
    values = {name: preset.get(knob.name, knob.default) for name, preset in PRESETS.items()}
    values |= {f"{name} {domain}": preset[knob.name] for (name, domain), preset in DOMAIN_PRESETS.items()
               if knob.name in preset}
    values = {name: str(value).replace(f"{ROOT}/", "") for name, value in values.items()}
    return {"default": values["tiny"]} if len(set(values.values())) == 1 and values["tiny"] else \
        {name: value for name, value in values.items() if value}


def parse_bool(text: str) -> bool:
    if text.lower() not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{text!r}: give true or false")
    return text.lower() == "true"


def resolve_config(args: argparse.Namespace, domain: str) -> Config:
    """Defaults, then the preset, then the flags."""
    preset = args.preset or Config(domain=domain).preset
    given = {knob.name: getattr(args, knob.name) for knob in fields(Config)
             if knob.name != "domain" and getattr(args, knob.name) is not None}
    if args.word == "search-harness":
        if given.setdefault("method", "harness") != "harness":
            raise UsageError(f"search-harness --method {given['method']}: it is --method harness alone")
        if given.get("engine") == "server" and "model" not in given:
            raise UsageError("search-harness --engine server needs --model NAME, as the server calls it")
        device = {"device": "cpu"} if given.get("engine") == "server" else {}           # nothing is computed here
        given = {"cycles": 1, "one_search": True, **device, **given}
    known = {**PRESETS[preset], **DOMAIN_PRESETS.get((preset, domain), {})}
    cfg = Config(**{"domain": domain, **known, **given, "preset": preset})
    for knob in fields(Config):
        value, (low, high) = getattr(cfg, knob.name), BOUNDS.get(knob.name, (0, 10**9))
        flag = f"--{knob.name.replace('_', '-')}"
        if isinstance(value, str) and UNSAFE.search(value.replace("\n", "\0").replace("\t", "\0")):
            raise UsageError(f"{flag}: holds a character that cannot be shown")
        if not isinstance(value, str) and not low <= value <= high:                     # nor is NaN
            raise UsageError(f"{flag} {value}: must be at least {low} and at most {high}")
    if cfg.max_iterations < cfg.min_iterations:
        raise UsageError(f"--max-iterations {cfg.max_iterations}: must be at least --min-iterations, "
                         f"{cfg.min_iterations}")
    check_layers(cfg.waived, (*LAYERS, AGENT_LAYER, HTTPS))
    check_urls(cfg)
    check_costs(cfg)
    if cfg.tp > 1 and cfg.engine != "vllm":
        raise UsageError(f"--tp {cfg.tp} is for --engine vllm")
    if cfg.method != "harness" and cfg.max_len > cfg.micro_tok:
        raise UsageError(f"--max-len {cfg.max_len}: a rollout of that length does not fit --micro-tok {cfg.micro_tok}")
    if (cfg.engine == "server") != bool(cfg.urls):
        raise UsageError("--engine server needs --urls URL,URL" if not cfg.urls else
                         f"--urls {cfg.urls} is for --engine server, and this is --engine {cfg.engine}")
    if "/" in cfg.name or cfg.name in (".", ".."):
        raise UsageError(f"--name {cfg.name}: a name, not a path; where runs lie is --out")
    if not cfg.urls:
        locate(cfg.model)
    if not re.fullmatch("cpu|cuda(:[0-9]{1,3})?", cfg.device):
        raise UsageError(f"--device {cfg.device}: is cpu or cuda")
    if cfg.device.startswith("cuda") and not torch.cuda.is_available():
        raise UsageError(f"--device {cfg.device}: torch sees no GPU here; --device cpu")
    try:
        rollout_config(cfg)
        train_config(cfg)
    except ValueError as error:
        raise UsageError(f"settings: {error}") from None
    return cfg


def check_layers(waived: tuple[str, ...], known: tuple[str, ...] = LAYERS) -> None:
    if unknown := set(waived) - set(known):
        raise UsageError(f"--waive {','.join(sorted(unknown))}: the layers are {', '.join(known)}")


def command_run(args: argparse.Namespace) -> int:
    cfg = resolve_config(args, args.domain)
    run = Run(cfg, args.ranks)
    if run.state.complete:
        print(f"this run is complete; nothing to do. Give another --name or --seed, or remove {run.dir.path}")
        run.show_again()
    else:
        with closing(run):
            train_whale(run)
    folder = run.dir.path
    run.dir.screen.show_end(read_sealed(folder / "summary.json"), run.h0, run.harness.source, folder)
    return 0


def open_parts(args: argparse.Namespace):
    """Environment, splits, engine, sandbox and rollout settings for a command that uses one harness and one model."""
    cfg = resolve_config(args, args.domain)
    env, splits = load_splits(cfg)
    source = read_file(cfg.harness or str(env.h0))
    env.open()
    cfg = pin_model(cfg)
    print(*describe_model(cfg), sep="\n", end="\n" * bool(describe_model(cfg)), file=sys.stderr)
    engine = open_engine(cfg)
    sandbox = Sandbox(waive=cfg.waived_layers)
    return cfg, env, splits, source, engine, sandbox, rollout_config(cfg)


def command_eval(args: argparse.Namespace) -> int:
    if not 1 <= args.n <= 10_000:
        raise UsageError(f"--n {args.n}: must be at least 1 and at most 10000")
    cfg, env, splits, source, engine, sandbox, rollout_cfg = open_parts(args)
    if why := parse_harness(source)[1]:
        raise UsageError(f"--harness {cfg.harness}: {why}")
    tasks, n = splits[args.split], args.n
    with closing(engine), sandbox, Screen(quiet=args.json).bar("rollouts", len(tasks) * n) as advance:
        traces = rollout.run(engine, env, sandbox, source, tasks, n, (cfg.seed, "eval", 0), rollout_cfg,
                             lambda trace: advance())
    print(*engine.notes, sep="\n", end="\n" if engine.notes else "", file=sys.stderr)
    means = task_means(traces, n)
    key = hashlib.sha256(json.dumps([source, args.split, n, asdict(cfg)]).encode()).hexdigest()[:12]
    path = Path(cfg.out) / "eval" / f"{cfg.domain}-{args.split}-{key}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, "".join(json.dumps(trace.to_json()) + "\n" for trace in traces))
    summary = rollout.summarise(traces)
    show(args, {"mean": sum(means) / len(means), "ci95": list(bootstrap_ci(means, cfg.seed)), "n_tasks": len(tasks),
                "n_ok": summary["n_ok"], "n_error": summary["n_error"], "n_killed": summary["n_killed"], "n_infra": 0,
                "traces": str(path), **judged(env)})
    return 0


def judged(env) -> dict:
    """What the judge did, if there was one."""
    judge = env.judge
    return {"judge": {"model": judge.model, "asked": judge.n_asked, "failed": judge.n_failed,
                      "cached": judge.n_cached}} if judge else {}


def command_check_harness(args: argparse.Namespace) -> int:
    args.harness = args.file
    cfg, env, splits, source, engine, sandbox, rollout_cfg = open_parts(args)
    with closing(engine), sandbox:
        probes = check_harness(source, env, engine, sandbox, splits["harness"],
                               ForbiddenText([task for tasks in splits.values() for task in tasks]), rollout_cfg,
                               (cfg.seed, "check"))
    passed = all(probe.passed for probe in probes)
    show(args, {"passed": passed, "probes": [asdict(probe) for probe in probes]})
    return 0 if passed else EXIT_REFUSED


def command_sandbox(args: argparse.Namespace) -> int:
    read_file(args.file)
    waived = tuple(filter(None, args.waive.split(",")))
    check_layers(waived)
    try:
        limits = Limits(args.seconds, args.mb)
    except ValueError as error:
        raise UsageError(str(error)) from None
    show(args, run_snippet(args.file, limits, waived))
    return 0


def command_verify(args: argparse.Namespace) -> int:
    if bool(args.cases) == bool(args.reply_file):
        raise UsageError("verify: give either --cases FILE.jsonl, or --reply-file FILE with --reference TEXT")
    if args.cases:
        report = verify_cases(args.domain, Path(args.cases))
        show(args, report)
        return 0 if not report["misses"] else EXIT_REFUSED
    cells = {"id": "reply", "reference": args.reference, "fen": args.fen}
    for name in ("reference", "fen")[:2 if args.domain == "chess" else 1]:
        if cells[name] is None:
            raise UsageError(f"verify {args.domain}: --reply-file needs --{name} TEXT")
    env = ENVS[args.domain]()
    show(args, asdict(env.verify(env.read_case(Row("the flags", 1, cells)), read_file(args.reply_file))))
    return 0


def command_report(args: argparse.Namespace) -> int:
    for folder in map(Path, args.run):
        if (folder / "results.json").exists() or (folder / "arms").is_dir():
            print(compare.write_comparison(folder) / "report.html")
            continue
        if running := report.is_running(folder):
            print(f"{folder} is still running; its report shows what is finished", file=sys.stderr)
        print(report.write_report(folder, running))
    return 0


def command_export(args: argparse.Namespace) -> int:
    show(args, export.export_run(Path(args.run), Path(args.out), args.which, args.dtype,
                                 args.trust_remote_code))
    return 0


def show(args: argparse.Namespace, result: dict) -> None:
    """One JSON object and nothing else with --json; a line a key otherwise."""
    if args.json:
        print(json.dumps(result))
        return
    for key, value in result.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            print(f"{key}:", *("  " + "  ".join(f"{k}={plain(str(v))}" for k, v in row.items()) for row in value),
                  sep="\n")
        else:
            print(f"{key}: {plain(str(value))}")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="run.sh", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    words = parser.add_subparsers(dest="word", required=True, metavar="WORD")

    def word(name: str, command, **kwargs) -> argparse.ArgumentParser:
        sub = words.add_parser(name, allow_abbrev=False, **kwargs)
        sub.set_defaults(command=command)
        return sub

    for domain in CHOICES["domain"]:
        sub = word(domain, command_run, help="alternate weight and harness phases")
        sub.set_defaults(domain=domain)
        add_config_flags(sub, domain)
    add_config_flags(word("search-harness", command_run, help="search a harness once; train nothing"))
    sub = word("compare", lambda args: compare.command_compare(
        resolve_config(args, args.domain), args.methods, args.schedules, args.seeds, args.jobs),
        help="methods or schedules on the same seeds and budgets")
    add_config_flags(sub)
    compare.add_flags(sub)
    page = word("report", command_report, help="rebuild report.html from a run's files")
    page.add_argument("run", nargs="+", metavar="RUN", help="the directory of a run or of a comparison")
    out = word("export", command_export, help="a run's model and harness as a Hugging Face folder")
    export.add_flags(out)
    gpu_check.add_flags(word("gpu-check", gpu_check.command_gpu_check, help="what one GPU does with the paper's model"))
    sub = word("eval", command_eval, help="mean@n of one harness and one model")
    add_config_flags(sub)
    sub.add_argument("--split", choices=("train", "harness", "test"), default="test")
    sub.add_argument("--n", type=int, default=8)
    check = word("check-harness", command_check_harness, help="gates and probes on one harness file")
    add_config_flags(check)
    check.add_argument("file", metavar="FILE")
    box = word("sandbox", command_sandbox, help="run one snippet as the Python tool does")
    box.add_argument("file")
    box.add_argument("--seconds", type=float, default=2.0)
    box.add_argument("--mb", type=int, default=256)
    box.add_argument("--waive", default="")
    verify = word("verify", command_verify, help="ask the verifier why")
    verify.add_argument("domain", choices=CHOICES["domain"])
    for flag, meaning in (("--cases", "a file of cases"), ("--reply-file", "the model's last message"),
                          ("--reference", "search: one answer or a list; chess: the moves in UCI"), ("--fen", "chess")):
        verify.add_argument(flag, help=meaning)
    data.add_flags(word("data", data.command_data, help="write the paper's splits"))
    bench.add_flags(word("bench", bench.command_bench, help="how fast this is, against the same work done bare"))
    retriever.add_flags(word("retriever", retriever.command_retriever, help="serve a corpus"))
    for command in (sub, check, box, verify, out):
        command.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    return parser


def run_command(argv: list[str] | None, ranks: Ranks) -> int:
    """One command -> its exit code. SystemExit where argparse has said what is wrong with the words."""
    try:
        words = sys.argv[1:] if argv is None else argv
        if odd := [word for word in words if re.search("[\ud800-\udfff]", word)]:
            raise UsageError(f"{ascii(odd[0])}: is not UTF-8 text; give that file or folder another name")
        args = build_parser().parse_args(words)
    except SystemExit as error:
        if error.code:
            raise
        return 0                                        # --help
    args.ranks = ranks
    return args.command(args)


def room_at(path: str | None) -> str:
    """The most frequent reason for a file that cannot be written."""
    folders = [Path(path).absolute(), *Path(path).absolute().parents] if path else []
    for folder in folders:
        if os.path.isdir(folder):                       # Path.is_dir raises where a name is too long
            return f" ({shutil.disk_usage(folder).free >> 20:,} MiB are free on that disk)"
    return ""


def main(argv: list[str] | None = None) -> int:
    ranks, stop.can_raise, stop.was_told = ALONE, True, False
    try:
        with open_ranks() as ranks:
            if ranks.rank:
                follow(ranks)
                return 0
            code = run_command(argv, ranks)
            ranks.broadcast(None)                       # no more orders
            return code
    except (UsageError, DataError, ModelError, SandboxUnavailable, SearchError, InfraError, EngineDied,
            RetrieverError, RetrieverDown, JudgeDown, TrackerError, ArmFailed, TrainError) as error:
        print(plain(f"run.sh: {f'rank {ranks.rank}: ' * (ranks.rank > 0)}{error}"), file=sys.stderr)
        return EXIT_USAGE if isinstance(error, UsageError) else EXIT_REFUSED
    except KeyboardInterrupt as error:
        number = next(iter(error.args), signal.SIGINT)
        if stop.is_listening:
            stop.end_children()
        stop.tell(number)
        return 128 + number
    except (torch.OutOfMemoryError, MemoryError) as error:
        print(f"run.sh: out of memory: {error}. What was finished is safe: with more of it, or with a smaller "
              "--gpu-memory-frac or --gradient-checkpointing true, the same command goes on. A run of its own has "
              "smaller --n-rows, --micro-tok and --head-chunk-tok", file=sys.stderr)
        return EXIT_REFUSED
    except OSError as error:
        what = f"{error.filename or 'a file'}: {error.strerror or error}{room_at(error.filename)}"
        print(plain(f"run.sh: {what}. What was finished is safe: when this is mended, the same command goes on"),
              file=sys.stderr)
        return EXIT_REFUSED


if __name__ == "__main__":
    leave_no_core()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")            # a model's words, in a locale that lacks their letters
    sys.exit(main())
