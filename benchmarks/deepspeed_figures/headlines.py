"""The paper's headlines, as the planner predicts them."""

from benchmarks.deepspeed_figures.points import points, read
from jaxinfer.sharding.planner import Catalogue, Plan, System, Ways, Workload, predict
from jaxinfer.sharding.planner.costs import Runner
from jaxinfer.sharding.planner.search import FORMATS

TRILLION = "moe-1t"


def predicted() -> dict[str, float]:
    """Return each headline's prediction, by its name in the data file."""
    point = next(point for point in points("deepspeed-moe") if point.model == TRILLION)
    seconds = point.predicted(Catalogue.read().systems["deepspeed-moe"])
    rate = step_bytes(TRILLION, point.ways) / seconds
    device = Catalogue.read().device(point.device)
    return {
        "trillion_ms": 1e3 * seconds,
        "trillion_tb_per_s": rate / 1e12,
        "trillion_share": rate / (point.ways.size * device.bandwidth),
        "mixture_speedup": speedup("pytorch-moe", "deepspeed-moe"),
        "int8_speedup": speedup("fastertransformer", "deepspeed-int8"),
        "zero_share_of_peak": zero_share(),
    }


def step_bytes(model: str, ways: Ways) -> float:
    """Return the bytes of layers that all devices read in a pass, experts without tokens and copies included."""
    shape, catalogue = Catalogue.read().model(model), Catalogue.read()
    runner = Runner(
        model=shape,
        device=catalogue.device("a100-40"),
        system=catalogue.systems["deepspeed-moe"],
        ways=ways,
        format=FORMATS[None],
    )
    return ways.size * sum(layer.count * runner.layer_bytes(layer) for layer in shape.layers)


def speedup(slower: str, faster: str) -> float:
    """Return the largest predicted ratio of two systems over their points."""
    systems = Catalogue.read().systems
    pairs = zip(points(slower), points(faster), strict=True)
    return max(slow.predicted(systems[slower]) / fast.predicted(systems[faster]) for slow, fast in pairs)


def zero_share() -> float:
    """Return the share of an A6000's peak that a 50B model in DRAM reaches, with as many prompts as fit."""
    catalogue = Catalogue.read()
    model, device = catalogue.model("gpt-50b"), catalogue.device("a6000")
    system: System = catalogue.systems["deepspeed-fp16"]
    work = Workload(batch=8, prompt=2048, generate=1)
    made = predict(model, device, system, FORMATS[None], Plan(ways=Ways(), weights="host"), work)
    operations = 2 * work.batch * work.prompt * (model.params - model.head_params)
    return operations / made.first.total / device.flops


def measured() -> dict[str, float]:
    """Return what the paper says, by name."""
    return read()["headlines"]
