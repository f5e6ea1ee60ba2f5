"""What a harness search will take, before it starts; what it may take; and what it has cost so far.

Counted are the rollouts of the search (scoring, gates, confirming), its proposals (candidates that were proposed) and
money: what the proposer reports or --proposer-price says, and what the servers of --model-price charge for the policy.
A price that is not known is said to be unknown, and is never counted as 0; --max-cost needs all prices to be known.
"""

from dataclasses import dataclass

from acceptance import kept_rollouts
from config import ALTERNATING, Config, n_steps, rollout_budget
from gates import N_GATE_ROLLOUTS
from files import UsageError
from sessions import parse_price, price_of

OWN_PRICE = ("claude", "opencode")          # commands that report what a session cost


@dataclass(frozen=True)
class Plan:
    """What a run comes to, in rollouts and proposals."""
    scoring: int = 0
    gates: int = 0
    confirming: int = 0
    evaluation: int = 0
    proposals: int = 0          # candidates
    requests: int = 0           # to the proposer
    is_sure: bool = True        # these are upper bounds; where a budget of rollouts decides, candidates that are
                                # refused or stopped early make room for more

    @property
    def rollouts(self) -> int:
        return self.scoring + self.gates + self.confirming + self.evaluation


def plan_search(cfg: Config, n_train: int, n_tasks: int, n_test: int) -> Plan:
    """What the settings amount to. `n_train`, `n_tasks`, `n_test`: tasks of D_weight, D_harness and D_test."""
    if cfg.method == "weight":
        return Plan()
    iterations = cfg.max_iterations if cfg.method == "adaptive" else cfg.iterations
    a_phase = 1 + (iterations - 1) * cfg.candidates                     # harnesses that are scored
    is_sure = cfg.one_search or cfg.method in ALTERNATING and not cfg.rollouts
    step = 0 if cfg.one_search else n_steps("--epochs", cfg.epochs, cfg, n_train) * cfg.prompt_batch * cfg.group_size
    budget = rollout_budget(cfg, n_train, n_tasks)
    if cfg.one_search:
        phases, scored, archives = cfg.cycles, 1 + (cfg.cycles * iterations - 1) * cfg.candidates, 1
    elif cfg.method in ALTERNATING:
        phases = cfg.cycles if is_sure else -(-budget // (step + a_phase * n_tasks)) + (cfg.finish == "harness")
        scored, archives = phases * a_phase, phases
    else:                                                               # one archive, as long as the budget lasts
        weights = step * (cfg.stagewise_phases or cfg.cycles) if cfg.method == "stagewise" else 0
        scored, archives = max(1, (budget - weights) // n_tasks), 1
        phases = -(-(1 + -(-(scored - 1) // cfg.candidates)) // iterations)
    kept = phases * kept_rollouts(cfg.accept, n_tasks)
    proposals = min(scored - archives, cfg.max_proposals or scored)
    if cfg.max_rollouts:
        proposals = min(proposals, max(0, cfg.max_rollouts - kept - archives * n_tasks) // (n_tasks + N_GATE_ROLLOUTS))
    evaluations = 1 + phases * (2 if cfg.method in ALTERNATING else 1)
    return Plan(
        (proposals + archives) * n_tasks, proposals * N_GATE_ROLLOUTS, kept,
        evaluations * (cfg.n_eval * n_test + n_tasks * (cfg.select == "harness-set")), proposals,
        -(-proposals // cfg.candidates), is_sure)


def describe(plan: Plan, cfg: Config) -> str:
    """The plan and its prices in words."""
    parts = [f"{plan.scoring:,} rollouts to score", f"{plan.gates:,} in gates"]
    parts += [f"{plan.confirming:,} to confirm"] if plan.confirming else []
    caps = [f"--{name.replace('_', '-')} {getattr(cfg, name):g}"
            for name in ("max_rollouts", "max_proposals", "max_cost") if getattr(cfg, name)]
    return (f"the harness search takes {'at most' if plan.is_sure else 'about'} {', '.join(parts)}, {plan.proposals} "
            f"proposals in {plan.requests} requests"
            + ", more where some are refused or stopped early" * (not plan.is_sure)
            + f"; proposer {cfg.proposer}: {proposer_cost(cfg)}; model: {model_cost(cfg, plan)}"
            + f"; caps: {', '.join(caps) or 'none'}")


def proposer_cost(cfg: Config) -> str:
    if cfg.proposer == "rules":
        return "free"
    known = "reports its cost" if reports_cost(cfg) else (
        f"{cfg.proposer_price} $ a million tokens" if cfg.proposer_price else
        "price unknown unless it reports it (--proposer-price)")
    limit = f"${cfg.proposer_usd:g} at most" if cfg.proposer_usd else "no limit (--proposer-usd)"
    return f"{known}; a session: {limit}"


def model_cost(cfg: Config, plan: Plan) -> str:
    if cfg.engine != "server":
        return "runs here, without a price"
    if not cfg.model_price:
        return "price unknown (--model-price)"
    usd = price_of(cfg.model_price, 0, plan.rollouts * cfg.max_assistant_tok)
    return (f"{cfg.model_price} $ a million tokens: with {plan.evaluation:,} rollouts of evaluation, at most "
            f"${usd:,.2f} for what it samples, and prompts")


def reports_cost(cfg: Config) -> bool:
    return cfg.proposer == "cmd" and cfg.proposer_cmd in OWN_PRICE


def check_costs(cfg: Config) -> None:
    """UsageError where a price cannot be read, --max-cost could not be kept, or a flag is another proposer's."""
    own_flags = (("cmd", "--proposer-cmd", cfg.proposer_cmd != Config.proposer_cmd),
                 ("cmd", "--proposer-env", cfg.proposer_env), ("api", "--proposer-url", cfg.proposer_url))
    for owner, flag, given in own_flags:
        if given and cfg.proposer != owner:
            raise UsageError(f"{flag} is for --proposer {owner}, and this is --proposer {cfg.proposer}")
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
    """What the caps leave, from the ledger of the run. Evaluation after a phase, and confirming, are kept for."""

    def __init__(self, cfg: Config, ledger: dict[str, dict[str, float]], n_tasks: int, n_test: int):
        self.cfg, self.ledger, self.n_tasks, self.n_test = cfg, ledger, n_tasks, n_test
        self.n_kept = kept_rollouts(cfg.accept, n_tasks)

    def spent(self, what: str, kinds: tuple[str, ...] = ("harness", "gates")) -> float:
        return sum(self.ledger[kind].get(what, 0) for kind in kinds)

    def usd_of(self, kinds: tuple[str, ...]) -> float:
        """Known money; what is not known is counted apart, as proposer_unpriced."""
        return self.spent("proposer_usd", kinds) + self.model_usd(kinds)

    def model_usd(self, kinds: tuple[str, ...]) -> float:
        if not self.cfg.model_price:
            return 0.0
        return price_of(self.cfg.model_price, self.spent("prompt_tok", kinds), self.spent("completion_tok", kinds))

    @property
    def usd(self) -> float:
        return self.usd_of(tuple(self.ledger))

    def money(self) -> dict:
        """For the summary: what is known, and what is not, which is not 0."""
        unknown = self.cfg.engine == "server" and not self.cfg.model_price
        return {"known": round(self.usd, 4), "proposer": round(self.spent("proposer_usd"), 4),
                "model": None if unknown else round(self.model_usd(tuple(self.ledger)), 4),
                "unpriced_sessions": int(self.spent("proposer_unpriced"))}

    @property
    def rollout_usd(self) -> float:
        """Of one rollout of the policy: the dearest mean so far, of evaluation, scoring and gates."""
        return max(self.model_usd((kind,)) / self.spent("rollouts", (kind,)) if self.spent("rollouts", (kind,)) else 0.0
                   for kind in ("eval", "harness", "gates"))

    def n_candidates(self, first: bool) -> tuple[int, str]:
        """How many more candidates the caps allow, and the cap that says so. `first`: the incoming harness is still to
        be scored, and without a candidate beside it that is in vain."""
        cfg, found, a_candidate = self.cfg, [(1 << 30, "")], self.n_tasks + N_GATE_ROLLOUTS
        if cfg.max_rollouts:
            left = cfg.max_rollouts - int(self.spent("rollouts")) - self.n_kept - first * self.n_tasks
            found.append((left // a_candidate, f"--max-rollouts {cfg.max_rollouts}"))
        if cfg.max_proposals:
            found.append((self.proposals_left, f"--max-proposals {cfg.max_proposals}"))
        if cfg.max_cost:
            unpriced = int(self.spent("proposer_unpriced"))
            left, each = self.usd_for_candidates(first), self.rollout_usd * a_candidate
            n = 0 if left <= 0 or unpriced else int(left / each) if each else 1 << 30
            why = f" ({unpriced} sessions did not say what they cost)" if unpriced else ""
            found.append((n, f"--max-cost {cfg.max_cost:g}{why}"))
        n, cap = min(found)
        return max(0, n), cap

    @property
    def proposals_left(self) -> int | None:
        return max(0, self.cfg.max_proposals - int(self.spent("proposals"))) if self.cfg.max_proposals else None

    def usd_for_candidates(self, first: bool) -> float:
        n_kept = self.n_kept + self.cfg.n_eval * self.n_test + first * self.n_tasks
        return self.cfg.max_cost - self.usd - self.rollout_usd * n_kept

    def usd_left(self, n_candidates: int) -> float | None:
        """For the proposer, when what it proposes is paid for; None: no cap."""
        if not self.cfg.max_cost:
            return None
        a_candidate = self.rollout_usd * (self.n_tasks + N_GATE_ROLLOUTS)
        return max(0.0, self.usd_for_candidates(False) - n_candidates * a_candidate)
