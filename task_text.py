"""`task.md`: what a proposer is told, rendered from prompts/task_<domain>.md.jinja.

The shared text, prompts/task.md.jinja, makes sense alone: a domain without a template of its own gets that one, with
what its Env says of itself. Nothing in the text depends on a reference.
"""

import inspect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import sqrt
from pathlib import Path

import jinja2

import harness_api
from lint import MAX_SOURCE_BYTES
from rollout import MAX_TOOL_CALLS, RolloutConfig
from tasks import Task

PROMPTS = Path(__file__).resolve().parent / "prompts"
N_FINDINGS = 5          # of each earlier cycle, beside what was kept: those that moved the score most, up or down
HYPOTHESIS_CHARS = 300  # of a finding's; a longer one ends in ...


@dataclass(frozen=True)
class Finding:
    """A candidate that an earlier cycle scored."""
    cycle: int
    name: str
    score: float
    ci95: tuple[float, float]
    base_score: float                   # of its parent, on the same tasks and weights
    hypothesis: str
    kept: bool                          # the cycle ended with it

    @property
    def gain(self) -> float:
        return self.score - self.base_score


def task_text(env, tasks: Sequence[Task], cfg: RolloutConfig, n_candidates: int, prompts_only: bool = False,
              earlier: Iterable[Finding] = (), slots: Sequence[str] = (), max_len: int = 0,
              rule: str = "best") -> str:
    """The text for one session of a proposer. `tasks`: those that candidates are scored on, one at least.

    slots: the names that this session is to fill (h4, h5, h6); (): they come with the request.
    max_len: tokens of the model's context (engine.max_len); 0: the text gives no number.
    rule: which candidate is accepted (acceptance.ACCEPT).
    """
    if slots and len(slots) != n_candidates:
        raise ValueError(f"{len(slots)} slots for {n_candidates} candidates")
    page = jinja2.Environment(loader=jinja2.FileSystemLoader(PROMPTS), autoescape=False, trim_blocks=True,
                              undefined=jinja2.StrictUndefined, lstrip_blocks=True, keep_trailing_newline=True)
    return page.select_template([f"task_{env.name}.md.jinja", "task.md.jinja"]).render(
        env=env, about=inspect.cleandoc(env.__doc__ or ""), fields=list(env.start(tasks[0])[1]), n_tasks=len(tasks),
        noise=0.5 / sqrt(len(tasks)), cfg=cfg, max_tool_calls=MAX_TOOL_CALLS, max_source_bytes=MAX_SOURCE_BYTES,
        max_len=max_len, api=harness_api, n_candidates=n_candidates, slots=list(slots), prompts_only=prompts_only,
        rule=rule, cycles=findings_by_cycle(earlier), hypothesis_chars=HYPOTHESIS_CHARS)


def findings_by_cycle(earlier: Iterable[Finding]) -> list[tuple[int, list[Finding]]]:
    """(cycle, its findings to show): what was kept first, then the others that are shown, the largest gain first."""
    shown = []
    for cycle, group in groupby(sorted(earlier, key=lambda finding: finding.cycle), key=lambda finding: finding.cycle):
        kept, others = [], []
        for finding in group:
            (kept if finding.kept else others).append(finding)
        others = sorted(others, key=lambda finding: -abs(finding.gain))[:N_FINDINGS]
        shown.append((cycle, kept + sorted(others, key=lambda finding: -finding.gain)))
    return shown
