"""The simulated engine takes the steps of the real one."""

from jaxinfer.compiled import Costs
from jaxinfer.evaluation.generation import simulator
from jaxinfer.evaluation.generation.replay import TokenRequest, replay
from jaxinfer.generation.engine.speculation import PassCosts


class Times:
    def seconds(self, batch):
        return 0.001


def requests():
    shared = list(range(1, 21))
    prompts = [shared + [30 + index] * (4 * index + 1) for index in range(6)]
    return [TokenRequest(arrival=0.0, prompt=prompt, output_tokens=30 - 4 * (len(prompt) % 3)) for prompt in prompts]


def watch(engine, monkeypatch):
    """Return the sizes of the steps that an engine runs from now on."""
    steps, launch = [], engine.executor.launch

    def watched(batch):
        cached = [admission.num_cached_tokens for admission in batch.admissions]
        steps.append((len(batch.chunks), len(batch.rows), batch.passes, cached))
        return launch(batch)

    monkeypatch.setattr(engine.executor, "launch", watched)
    return steps


def test_the_steps_are_those_of_the_real_engine(small_llm, monkeypatch):
    engine, plan = small_llm.engine, small_llm._loaded.plan
    costs = Costs.fixed({("decode", (("batch", rows), ("speculative", 0))): 0.001 for rows in (1, 2, 4)})
    for pool in engine.scheduler.pools:
        pool.reset()
    monkeypatch.setattr(engine.scheduler.passes, "costs", PassCosts(costs, 0))
    real_steps = watch(engine, monkeypatch)
    real = replay(engine, requests())

    made = []

    def watched(engine, *args, **options):
        made.append(watch(engine, monkeypatch))
        return replay(engine, *args, **options)

    monkeypatch.setattr(simulator, "replay", watched)
    simulated = simulator.simulate(requests(), engine.config, plan, Times(), costs=costs, platform="cpu")
    assert made[0] == real_steps
    assert simulated.preemptions == real.preemptions > 0
    assert simulated.cached_tokens == real.cached_tokens > 0
    assert simulated.steps == real.steps
    lengths = [[len(record.events), record.output_tokens] for record in simulated.records]
    assert lengths == [[len(record.events), record.output_tokens] for record in real.records]
