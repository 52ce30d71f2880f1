"""When requests arrive, in seconds from the start: Poisson, or as a trace has them."""

import dataclasses
import datetime
import gzip
from pathlib import Path

import numpy as np

from jaxinfer.evaluation.traces import read_trace

AZURE_COLUMNS = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TracedRequest:
    """A line of a trace.

    Attributes:
      arrival: seconds from the start.
      prompt_tokens: tokens of the prompt; None: as for all requests.
      output_tokens: tokens to generate; None: as for all requests.
    """

    arrival: float
    prompt_tokens: int | None = None
    output_tokens: int | None = None


def poisson(rate: float, count: int, rng: np.random.Generator) -> list[TracedRequest]:
    """Draw arrivals that come independently of each other. rate: requests a second."""
    return [TracedRequest(arrival=float(when)) for when in np.cumsum(rng.exponential(1 / rate, count))]


def read_arrivals(file: Path) -> list[TracedRequest]:
    """Read a trace.

    A file that ends in `.jsonl` has a `TracedRequest` a line. One that ends in `.csv` is an Azure LLM inference trace:
    a time, the tokens of the prompt, and the generated ones (one at least). Any other has the milliseconds since the
    arrival before, a whole number a line, as `benchmarks/data` has them; it may be gzipped (`.gz`), and # begins a
    comment.

    Raises ValueError that names the file, and the line if one is wrong.
    """
    if file.suffix == ".jsonl":
        items = read_trace(file, TracedRequest, name="a request of a trace")
    elif file.suffix == ".csv":
        items = _azure(file, _lines(file))
    else:
        lines = _lines(file)
        gaps = [_gap(line, file, number) for number, line in enumerate(lines, 1) if line and not line.startswith("#")]
        items = [TracedRequest(arrival=float(when)) for when in np.cumsum(gaps) / 1000]
    if not items:
        raise ValueError(f"{file} has no arrivals.")
    return items


def _lines(file: Path) -> list[str]:
    try:
        content = file.read_bytes()
        return (gzip.decompress(content) if file.suffix == ".gz" else content).decode().splitlines()
    except (OSError, UnicodeDecodeError, EOFError) as error:
        raise ValueError(f"{file} cannot be read: {error}.") from error


def _azure(file: Path, lines: list[str]) -> list[TracedRequest]:
    """Parse the lines of an Azure trace; times count from the first."""
    if not lines or lines[0].split(",") != AZURE_COLUMNS:
        raise ValueError(f"{file}: its first line must be {','.join(AZURE_COLUMNS)}, as in the Azure LLM traces.")
    items: list[TracedRequest] = []
    begin = None
    for number, line in enumerate(lines[1:], 2):
        try:
            when, prompt, output = line.split(",")
            time, tokens = datetime.datetime.fromisoformat(when), (int(prompt), max(1, int(output)))
            begin = begin or time
            seconds = (time - begin).total_seconds()
            if tokens[0] < 1 or seconds < (items[-1].arrival if items else 0.0):
                raise ValueError("a prompt has at least one token, and arrivals are in order")
        except (ValueError, TypeError) as error:
            raise ValueError(f"{file}:{number}: not a request of an Azure LLM trace ({error}): {line!r}.") from error
        items.append(TracedRequest(arrival=seconds, prompt_tokens=tokens[0], output_tokens=tokens[1]))
    return items


def _gap(line: str, file: Path, number: int) -> int:
    if not line.isdecimal():
        raise ValueError(f"{file}:{number}: not milliseconds since the arrival before: {line!r}.")
    return int(line)


def at_rate(items: list[TracedRequest], rate: float) -> list[TracedRequest]:
    """Stretch a trace to a mean of so many requests a second; its bursts stay. It begins with the first arrival."""
    first, last = items[0].arrival, items[-1].arrival
    factor = (len(items) - 1) / rate / (last - first) if last > first else 0.0
    return [dataclasses.replace(item, arrival=(item.arrival - first) * factor) for item in items]
