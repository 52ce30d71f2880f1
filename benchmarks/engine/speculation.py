"""Decode rates of one request with speculative tokens against without, where text repeats and where it is random."""

import random
import statistics
from typing import Any

from benchmarks.engine.settings import Settings
from benchmarks.peers.worker import VOCAB
from benchmarks.report import Report
from jaxinfer import LLM, SamplingParams

NUM_SPECULATIVE_TOKENS = 7

# Prompts whose continuation repeats them.
REPETITIVE = (
    "codes = {\n" + "    'name': 'value',\n" * 16,
    "values = [\n" + "    0, 1, 0, 1, 0, 1, 0, 1,\n" * 8,
    "class TestRead(unittest.TestCase):\n" + "    def test_read(self):\n        self.assertEqual(1, 1)\n\n" * 6,
)
UNPREDICTABLE = ("import os\n", "def main():\n", "class Reader:\n    ")


def decode_rates(
    plain: LLM, speculating: LLM, prompt: str | list[int], params: SamplingParams, rounds: int
) -> tuple[float, float]:
    """Measure tokens per second after the first, without and with speculation.

    Medians of rounds in which both take turns. Exits if the tokens differ.
    """
    rates: dict[str, list[float]] = {"plain": [], "speculating": []}
    for _ in range(rounds):
        tokens = {}
        for name, llm in (("plain", plain), ("speculating", speculating)):
            completion = llm.generate([prompt], params)[0].outputs[0]
            assert completion.timings.tokens_per_s is not None
            rates[name].append(completion.timings.tokens_per_s)
            tokens[name] = completion.token_ids
        if tokens["plain"] != tokens["speculating"]:
            at = [a == b for a, b in zip(*tokens.values(), strict=False)].index(False)
            raise SystemExit(f"Speculation changed token {at} of {prompt[:40]!r}: {tokens}")
    return statistics.median(rates["plain"]), statistics.median(rates["speculating"])


def speculation(report: Report, settings: Settings) -> None:
    """Check the lower one of two models' geometric means over their prompts."""
    source = random.Random(0)
    noise = [[source.randrange(3, VOCAB) for _ in range(64)] for _ in range(3)]
    # name, model directory, repetitive prompts, unpredictable prompts, output tokens, rounds of each prompt
    models = (
        ("demo", settings.demo, REPETITIVE, UNPREDICTABLE, 256, 10),  # of a quarter of a second
        ("random", settings.random_model(), [prompt[:4] * 16 for prompt in noise], noise, 96, 4),  # of 3 s
    )
    gains: dict[str, list[float]] = {"speculation_gain_repetitive": [], "speculation_worst": []}
    for name, folder, repetitive, unpredictable, count, rounds in models:
        plain, speculating = (
            LLM(folder, dtype="float32", max_batch=1, context=512, num_speculative_tokens=size)
            for size in (0, NUM_SPECULATIVE_TOKENS)
        )
        for figure, prompts, temperature in zip(gains, (repetitive, unpredictable), (0.0, 1.0), strict=True):
            ratios: list[float] = []
            options: dict[str, Any] = {"temperature": temperature, "max_tokens": count, "ignore_eos": True}
            decode_rates(plain, speculating, prompts[0], SamplingParams(**options, seed=0), 1)  # learns passes' costs
            for seed, prompt in enumerate(prompts):
                params = SamplingParams(**options, seed=seed)
                without, drafted = decode_rates(plain, speculating, prompt, params, 1 if settings.quick else rounds)
                ratios.append(drafted / without)
                report.row(figure=figure, model=name, prompt=seed, without=round(without, 1), drafted=round(drafted, 1))
            gains[figure].append(statistics.geometric_mean(ratios))
    report.check("speculation_gain_repetitive", min(gains["speculation_gain_repetitive"]), "x", target=1.5)
    report.check("speculation_worst", min(gains["speculation_worst"]), "x", target=0.95)
