"""What a harness search will take, before it starts; what it may take; and what it has cost so far.

Counted are the rollouts of the search (scoring, gates, confirming), its proposals (candidates that were proposed) and
money: what the proposer reports or --proposer-price says, and what the servers of --model-price charge for the policy.
A price that is not known is said to be unknown, and is never counted as 0; --max-cost needs all prices to be known.
"""

from dataclasses import dataclass

from acceptance import kept_rollouts
from config import Config, n_steps, rollout_budget
from gates import N_GATE_ROLLOUTS
from rundir import UsageError
from sessions import parse_price, price_of

OWN_PRICE = ("claude", "opencode")          # commands that report what a session cost


@dataclass(frozen=True)
class Plan:
    """Upper bounds of a run: a race stops early, a search may end before its limit."""
    phases: int                 # harness phases
    scoring: int                # rollouts
    gates: int
    confirming: int
    evaluation: int
    proposals: int              # candidates
    requests: int               # to the proposer


def plan_search(cfg: Config, n_train: int, n_tasks: int, n_test: int) -> Plan:
    """What the settings amount to. `n_train`, `n_tasks`, `n_test`: tasks of D_weight, D_harness and D_test."""
    budget = rollout_budget(cfg, n_train, n_tasks)
    iterations = cfg.max_iterations if cfg.method == "adaptive" else cfg.iterations
    phases, archives = (0, 0) if cfg.method == "weight" else (cfg.cycles, cfg.cycles)
    if cfg.one_search:
        proposals, archives = (cfg.iterations * cfg.cycles - 1) * cfg.candidates, 1
    elif cfg.method in ("harness", "stagewise"):
        step = n_steps("--epochs", cfg.epochs, cfg, n_train) * cfg.prompt_batch * cfg.group_size
        weights = step * (cfg.stagewise_phases or cfg.cycles) if cfg.method == "stagewise" else 0
        in_archive = max(1, (budget - weights) // n_tasks)                      # harnesses that are scored
        proposals, archives = in_archive - 1, 1
        phases = -(-proposals // (cfg.candidates * iterations)) or 1
    else:
        proposals = phases * (iterations - 1) * cfg.candidates
        if cfg.rollouts:
            proposals = min(proposals, max(0, budget // n_tasks - phases))
    if cfg.max_proposals:
        proposals = min(proposals, cfg.max_proposals)
    return Plan(phases, (proposals + archives) * n_tasks if phases else 0, proposals * N_GATE_ROLLOUTS,
                phases * kept_rollouts(cfg.accept, n_tasks), cfg.n_eval * n_test * (1 + 2 * phases), proposals,
                -(-proposals // cfg.candidates))


def describe(plan: Plan, cfg: Config) -> str:
    """The plan and its prices in words."""
    parts = [f"{plan.scoring:,} rollouts to score", f"{plan.gates:,} in gates"]
    parts += [f"{plan.confirming:,} to confirm"] if plan.confirming else []
    caps = [f"--{name.replace('_', '-')} {getattr(cfg, name):g}"
            for name in ("max_rollouts", "max_proposals", "max_cost") if getattr(cfg, name)]
    return (f"the harness search takes at most {', '.join(parts)}, {plan.proposals} proposals in {plan.requests} "
            f"requests; proposer {cfg.proposer}: {proposer_cost(cfg, plan)}; model: {model_cost(cfg, plan)}"
            + f"; caps: {', '.join(caps) or 'none'}")


def proposer_cost(cfg: Config, plan: Plan) -> str:
    if cfg.proposer == "rules":
        return "free"
    known = "reports its cost" if reports_cost(cfg) else (
        f"{cfg.proposer_price} $ a million tokens" if cfg.proposer_price else "price unknown (--proposer-price)")
    limit = f"at most ${cfg.proposer_usd * plan.requests:,.2f}" if cfg.proposer_usd else "no limit (--proposer-usd)"
    return f"{known}, {limit}"


def model_cost(cfg: Config, plan: Plan) -> str:
    if cfg.engine != "server":
        return "runs here, without a price"
    if not cfg.model_price:
        return "price unknown (--model-price)"
    rollouts = plan.scoring + plan.gates + plan.confirming + plan.evaluation
    usd = price_of(cfg.model_price, 0, rollouts * cfg.max_assistant_tok)
    return f"{cfg.model_price} $ a million tokens, at most ${usd:,.2f} for what it samples, prompts apart"


def reports_cost(cfg: Config) -> bool:
    return cfg.proposer == "cmd" and cfg.proposer_cmd in OWN_PRICE


def check_costs(cfg: Config) -> None:
    """UsageError where a price cannot be read, or --max-cost could not be kept."""
    for flag, price in (("--proposer-price", cfg.proposer_price), ("--model-price", cfg.model_price)):
        try:
            parse_price(price or "0,0")
        except ValueError as error:
            raise UsageError(f"{flag} {price}: {error}") from None
    if cfg.model_price and cfg.engine != "server":
        raise UsageError(f"--model-price {cfg.model_price}: --engine {cfg.engine} runs here and charges nothing")
    if cfg.max_cost and cfg.engine == "server" and not cfg.model_price:
        raise UsageError(f"--max-cost {cfg.max_cost:g}: what --urls charges is not known; give --model-price IN,OUT in "
                         "$ a million tokens (0,0 for servers of your own)")
    if cfg.max_cost and cfg.proposer == "api" and not cfg.proposer_price:
        raise UsageError(f"--max-cost {cfg.max_cost:g}: what --proposer-url charges is not known; give "
                         "--proposer-price IN,OUT in $ a million tokens (0,0 for a server of your own)")


class Budget:
    """What the caps leave, from the ledger of the run."""

    def __init__(self, cfg: Config, ledger: dict[str, dict[str, float]], n_tasks: int):
        self.cfg, self.ledger, self.n_tasks = cfg, ledger, n_tasks

    def spent(self, what: str, kinds: tuple[str, ...] = ("harness", "gates")) -> float:
        return sum(self.ledger[kind].get(what, 0) for kind in kinds)

    def usd_of(self, kinds: tuple[str, ...]) -> float:
        """Known money; what is not known is counted apart, as proposer_unpriced."""
        model = price_of(self.cfg.model_price, self.spent("prompt_tok", kinds), self.spent("completion_tok", kinds)) \
            if self.cfg.model_price else 0.0
        return self.spent("proposer_usd", kinds) + model

    @property
    def usd(self) -> float:
        return self.usd_of(tuple(self.ledger))

    @property
    def usd_left(self) -> float | None:
        """For the proposer; None: no cap."""
        return max(0.0, self.cfg.max_cost - self.usd) if self.cfg.max_cost else None

    def candidate_usd(self) -> float:
        """What scoring one more candidate will cost, as those before it."""
        return self.usd_of(("eval",)) / max(1, self.spent("rollouts", ("eval",))) * (self.n_tasks + N_GATE_ROLLOUTS)

    def n_candidates(self, kept: int, first: bool) -> tuple[int, str]:
        """How many more candidates the caps allow, and the cap that says so. `kept`: rollouts for the end of the phase;
        `first`: the incoming harness is still to be scored, and without a candidate beside it that is in vain."""
        cfg, found = self.cfg, [(1 << 30, "")]
        if cfg.max_rollouts:
            left = cfg.max_rollouts - int(self.spent("rollouts")) - kept - first * self.n_tasks
            found.append((left // (self.n_tasks + N_GATE_ROLLOUTS), f"--max-rollouts {cfg.max_rollouts}"))
        if cfg.max_proposals:
            asked = int(max(self.spent("proposals"), self.spent("proposer_calls")))
            found.append((cfg.max_proposals - asked, f"--max-proposals {cfg.max_proposals}"))
        if cfg.max_cost:
            each, left = self.candidate_usd(), self.usd_left - first * self.candidate_usd()
            unpriced = int(self.spent("proposer_unpriced"))
            n = 0 if left <= 0 or unpriced else int(left / each) if each else 1 << 30
            why = f" ({unpriced} sessions did not say what they cost)" if unpriced else ""
            found.append((n, f"--max-cost {cfg.max_cost:g}{why}"))
        n, cap = min(found)
        return max(0, n), cap
