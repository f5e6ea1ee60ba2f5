"""The proposers: who writes new harness files. A proposer is a function from `ProposalRequest` to candidates.

- rules     the embedded one, below
- cmd       a coding agent, as one command (agent_cmd.py)
- api       a model behind a chat endpoint, with an agent of our own (agent_api.py)

`propose_by_rules`, the embedded one, is a rule-based stand-in for a coding agent: it reads the archive's traces, counts
why rollouts failed, and writes complete new files that combine known mechanisms, each with a hypothesis that the counts
of its own score can prove wrong. It is deterministic for a seed. It cannot invent a mechanism; when it has tried all
that it knows, it returns fewer candidates, or none.

Differs from the paper: the paper's proposer is a coding agent (Claude Opus) with file access to the same archive.
"""

import random
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from agent_api import run_api_agent
from agent_cmd import check_settings, run_command_agent
from chat_endpoint import check_settings_api
from envs import ENVS
from lint import program_of
from candidates import Candidate, ProposalRequest, Score, select_best
from mechanisms import SAID, Mechanism, mechanisms_of, n_calls, render
from rollout import derive_seed
from sessions import ProposerConfig, propose_by_agent

PROPOSERS = ("rules", "cmd", "api")


def make_proposer(settings: ProposerConfig, closed: tuple[Path, ...] = (), guarded: tuple[Path, ...] = (),
                  waived: tuple[str, ...] = (),
                  say: Callable[[str], None] = print) -> Callable[[ProposalRequest], list[Candidate]]:
    """The one that --proposer names; UsageError if it cannot work. The rest is propose_by_agent's."""
    match settings.proposer:
        case "cmd":
            check_settings(settings, waived, closed)
            run_agent = run_command_agent
        case "api":
            settings, run_agent = check_settings_api(settings), run_api_agent
        case _:
            return propose_by_rules
    return partial(propose_by_agent, settings=settings, run_agent=run_agent, closed=closed, guarded=guarded,
                   waived=waived, say=say)


def add_mechanisms(base: frozenset[str], added: list[str], known: dict[str, Mechanism]) -> frozenset[str]:
    """The base with these in it, one of a group, and with the model calls that they need."""
    has = set(base)
    for name in added:
        has = {other for other in has if not known[name].group or known[other].group != known[name].group} | {name}
    needed = min(6, 2 + sum(known[name].n_extra_calls for name in has))
    if n_calls(has) < needed:
        has = {name for name in has if known[name].group != "calls"} | {f"calls_{needed + (needed == 5)}"}
    return frozenset(has)


def is_higher(new: Score, old: Score) -> bool:
    """On the tasks that both played: a race stops some early."""
    if not new.stopped and not old.stopped:
        return new.mean > old.mean
    shared = new.rewards.keys() & old.rewards.keys()
    return sum(new.rewards[task] for task in shared) > sum(old.rewards[task] for task in shared)


def propose_by_rules(request: ProposalRequest) -> list[Candidate]:
    """M new harnesses from the archive's best, deterministic for a seed. Each slot takes the mechanism for the kinds of
    failure that are most frequent in the best's traces and that no earlier slot took up; the last combines several."""
    mechanisms = mechanisms_of(request.domain, request.prompts_only)
    h0 = ENVS[request.domain].h0.read_text(encoding="utf-8")
    known = {mechanism.name: mechanism for mechanism in mechanisms}
    cures = {mechanism.name: set(mechanism.cures.split()) for mechanism in mechanisms}
    best, rng = select_best(list(request.history)), random.Random(derive_seed(*request.seed))
    parent = best.candidate
    failures = Counter(best.score.failures)
    base, origin = frozenset(parent.mechanisms), ""
    if not base <= known.keys() or program_of(render(request.domain, base, "", h0)) != program_of(parent.source):
        base, origin = frozenset(), f"(from h0's structure, as the mechanisms of {parent.name} are not known) "
    scored = {o.candidate.name: o for o in request.history if o.score}
    tried = [(scored[o.candidate.parent], o) for o in scored.values() if o.candidate.parent]
    no_help = set().union(*(set(new.candidate.mechanisms) - set(old.candidate.mechanisms)
                            for old, new in tried if not is_higher(new.score, old.score)))

    def rank(chosen: set[str]) -> list[str]:
        """What could be added to the base and to `chosen`, by how many rollouts failed in ways that it addresses and
        they do not. Where it has not helped so far, they count half."""
        covered = set().union(*(cures[name] for name in chosen))
        weights = {name: sum(failures[word] for word in cures[name] - covered) / (2 if name in no_help else 1)
                   for name in known}
        groups = {known[name].group or name for name in chosen}
        return sorted((name for name in known if name not in base and (known[name].group or name) not in groups),
                      key=weights.get, reverse=True)                # stable: ties in the order of the table

    def fills(slot: int) -> Iterator[tuple[list[str], list[str]]]:
        """(added, removed) mechanisms for a slot, the most wanted first."""
        if slot < request.n_candidates - 1:
            if slot == request.n_candidates - 2 and base and len(request.history) > 6 and rng.random() < 0.5:
                yield [], [rng.choice(sorted(base))]                # later on: does something not earn its place?
            yield from (([name], []) for name in rank(used))
        several: list[str] = []
        for _ in range(4):
            several += rank(set(several))[:1]
        yield from ((several[:n], []) for n in (3, 2, 4))
        for _ in range(1000):                                       # at last anything, also from h0 afresh
            yield rng.sample(list(known), min(len(known), rng.randint(1, 5))), rng.choice([[], sorted(base)])

    def explain(added: list[str], removed: list[str]) -> str:
        """A hypothesis that the counts in the new candidate's score.json can prove wrong."""
        cited = {word: failures[word] for word in SAID if failures[word] and any(word in cures[name] for name in added)}
        claim = ", ".join([f"without {name}" for name in removed] + [f"with {known[name].claim}" for name in added])
        if removed or sum(cited.values()) < 2:
            goal = "does not fall below" if removed else "rises above"
            return f"{origin}{claim}, the mean reward {goal} {best.score.mean:.3f}"
        counts, half = ", ".join(f"{n} {SAID[word]}" for word, n in cited.items()), sum(cited.values()) // 2
        return f"{origin}of {best.score.n} rollouts of {parent.name}, {counts}; {claim}, at most {half} are left"

    taken = {program_of(outcome.candidate.source) for outcome in request.history}
    used: set[str] = set()                                          # mechanisms that this iteration has tried
    candidates = []
    for slot in range(request.n_candidates):
        for added, removed in fills(slot):
            has = add_mechanisms(base - set(removed), added, known)
            changed = [name for name in known if name in has - base]
            hypothesis = explain(changed, [name for name in removed if name not in has])
            source = render(request.domain, has, textwrap.fill(f"From {parent.name} by rule: {hypothesis}.", 116), h0)
            if program_of(source) not in taken:
                taken.add(program_of(source))
                used |= set(changed)
                candidates.append(Candidate("", parent.name, hypothesis, tuple(sorted(has)), source, 0))
                break
    return candidates
