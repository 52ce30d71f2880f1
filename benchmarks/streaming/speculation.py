"""The gain of speculation where layers come from disk: one fetch of a layer serves all tokens of a pass."""

import shutil
import statistics

from benchmarks.engine.speculation import NUM_SPECULATIVE_TOKENS, REPETITIVE, decode_rates
from benchmarks.report import Report
from benchmarks.streaming.settings import Settings
from jaxinfer import LLM, SamplingParams

TOKENS = 256
ROUNDS = 5


def speculation(report: Report, settings: Settings) -> None:
    """Compare tokens a second of the demo model from disk, one request at a time on repetitive text, with and without.

    The check's value is the geometric mean over the prompts, each of medians of rounds in which both take turns. Exits
    if the tokens differ.
    """
    model = settings.folder / "demo"
    shutil.copytree(settings.demo, model)
    plain, speculating = (
        LLM(model, dtype="float32", weights="disk", max_batch=1, context=512, num_speculative_tokens=size)
        for size in (0, NUM_SPECULATIVE_TOKENS)
    )
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, seed=0)
    decode_rates(plain, speculating, REPETITIVE[0], params, 1)  # learns what passes cost
    ratios = []
    for number, prompt in enumerate(REPETITIVE):
        without, guessed = decode_rates(plain, speculating, prompt, params, 1 if settings.quick else ROUNDS)
        ratios.append(guessed / without)
        figures = {"without": round(without, 1), "speculating": round(guessed, 1)}
        report.row(figure="streamed_speculation", prompt=number, **figures)
    gain = statistics.geometric_mean(ratios)
    report.check("streamed_speculation_gain", gain, "x the tokens/s without", target=1.5)
