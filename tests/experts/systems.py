"""Small systems: experts of 10 bytes, seconds that are easy to add up."""

from jaxinfer.evaluation.experts.simulator import Simulator
from jaxinfer.evaluation.experts.workloads import TraceRequest
from jaxinfer.experts.scheduling.executor_state import ExecutorConfig
from jaxinfer.experts.scheduling.experts import ExpertGraph, ExpertInfo, InputKind, Rule
from jaxinfer.experts.scheduling.policy import Policy, policy_of
from jaxinfer.experts.scheduling.profile import Profile
from jaxinfer.experts.scheduling.request import Batch, Failure, Load, Request
from jaxinfer.experts.scheduling.scheduler import Scheduler

GPU = Profile(k=1.0, b=2.0, max_batch=3, load={"disk": 10.0, "host": 1.0}, activation_bytes=5)
CPU = Profile(k=8.0, b=4.0, max_batch=2, load={"disk": 9.0, "host": 0.5}, activation_bytes=5)


def profiles(gpu=GPU, cpu=CPU):
    return {("resnet", "gpu"): gpu, ("resnet", "cpu"): cpu}


def expert(name, size=10, **changes):
    return ExpertInfo(name=name, architecture="resnet", bytes=size, **changes)


def graph_of(names, rules=(), **changes):
    """Experts with inputs of their own, the first one used most; `rules` of experts and those that follow them."""
    shares = {name: len(names) - place for place, name in enumerate(names)}
    return ExpertGraph(
        [changes.get(name) or expert(name) for name in names],
        [InputKind(name=name, expert=name, share=shares[name] / sum(shares.values())) for name in names],
        [Rule(expert=a, verdict="ok", next=b, probability=0.5) for a, b in rules],
    )


def gpu(slots=2, activations=15, device="gpu", **changes):
    """An executor with room for so many experts."""
    options = {"name": "gpu", "processor": "gpu", "device": device, "expert_bytes": 10 * slots}
    return ExecutorConfig(**{**options, "activation_bytes": activations, **changes})


def cpu(slots=2, activations=10, **changes):
    options = {"name": "cpu", "processor": "cpu", "device": "cpu", "expert_bytes": 10 * slots}
    return ExecutorConfig(**{**options, "activation_bytes": activations, **changes})


def scheduler(names="abcdef", *executors, policy="paper", rules=(), costs=None, placed=True, options=None, **changes):
    """A system with executors (default: one), its experts placed."""
    policy = policy if isinstance(policy, Policy) else policy_of(policy)
    made = Scheduler(
        graph_of(names, rules, **changes),
        profiles() if costs is None else costs,
        executors or [gpu()],
        policy,
        **(options or {}),
    )
    if placed:
        made.manager.place()
    return made


def trace(*routes, every=0.0):
    """Inputs that come to these experts: "ab" to a, then b."""
    return [TraceRequest(arrival=place * every, experts=tuple(route)) for place, route in enumerate(routes)]


def simulate(system, *routes, every=0.0):
    """What came of a trace, and all that was done: (what, expert, executor, number of requests)."""
    done = []
    outcome = Simulator(system, act=lambda action: done.append(shown(action))).run(trace(*routes, every=every))
    for pool in system.manager.pools:
        pool.check_integrity()
    return outcome, done


def shown(action):
    match action:
        case Load():
            return "load", action.expert, action.executor, action.tier
        case Batch():
            return "batch", action.expert, action.executor, len(action.requests)
        case Failure():
            return "failure", action.request.expert, type(action.error).__name__, action.request.id
    return "evict", *(eviction.expert for eviction in action.evictions)


def request(number, expert, arrival=0.0, **changes):
    return Request(id=number, expert=expert, arrival=arrival, **changes)
