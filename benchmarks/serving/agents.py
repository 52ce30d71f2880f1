"""What agents cost: the prompt tokens that each of their turns computes again, and the parser of every event.

The model is a small random one, whose chat template knows tools and reasoning. A character is a token.
"""

import dataclasses
import tempfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import httpx2
import rich

from benchmarks.report import Report
from benchmarks.serving.front_end import measure_served, medians
from benchmarks.serving.load import Load
from benchmarks.serving.processes import Server
from benchmarks.serving.servers import our_server
from benchmarks.serving.settings import Settings
from tests.tiny import AGENT_TEMPLATE, CHAT_TEMPLATE, ONE_KIND, save_tiny

LOAD = Load(streams=64, prompt=0, tokens=900)
TURNS, SYSTEM, RESULT, ANSWER = 20, 8000, 200, 128  # turns; and characters of each part
HEADER = "x-anthropic-billing-header: cc_version=2.1.{}; cc_entrypoint=cli; cch={:05x};"
TOOLS = [
    {
        "name": name,
        "description": f"Can {name} a file.",
        "input_schema": {
            "type": "object",
            "properties": {"path": {"type": "string", "maxLength": 20}},
            "required": ["path"],
            "additionalProperties": False,
        },
    }
    for name in ("read", "write")
]


def agents(report: Report, settings: Settings) -> None:
    """Measure `agent_prefix_hits` and `parser_overhead`."""
    with tempfile.TemporaryDirectory() as folder:
        config = dataclasses.replace(ONE_KIND, context=32768, layers=1)
        agent = save_tiny(Path(folder) / "agent", config=config, chat_template=AGENT_TEMPLATE)
        plain = save_tiny(Path(folder) / "plain", config=config, chat_template=CHAT_TEMPLATE)
        prefix_hits(report, settings, agent)
        parser_overhead(report, settings, agent, plain)


def prefix_hits(report: Report, settings: Settings, model: Path) -> None:
    """Run an agent's transcript, in which the header changes at each turn."""
    turns = 3 if settings.quick else TURNS
    with our_server(model, "--max-batch", "1") as server:
        server.wait()
        usages = transcript(server, turns)
    prompts = [usage["input_tokens"] + usage["cache_read_input_tokens"] for usage in usages]
    hits = sum(usage["cache_read_input_tokens"] for usage in usages[1:]) / sum(prompts[1:])
    row = {"turns": turns, "first_prompt": prompts[0], "last_prompt": prompts[-1], "hits": round(hits, 4)}
    report.row(figure="agents", **row)
    rich.print(f"an agent's transcript: {row}")
    report.check("agent_prefix_hits", hits, "of prompt tokens", target=0.95)


def transcript(server: Server, turns: int) -> list[dict[str, int]]:
    """Ask, and give the results of calls, again and again; return the usage of each answer.

    The model must call a tool in every second turn. In the others it may, and a random one does not.
    """
    random = Random(0)

    def text(size: int) -> str:
        return " ".join(f"word{random.randrange(1000)}" for _ in range(size))[:size]

    fixed, messages, usages = {"type": "text", "text": text(SYSTEM)}, [{"role": "user", "content": text(RESULT)}], []
    with httpx2.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=600, trust_env=False) as client:
        for turn in range(turns):
            header = {"type": "text", "text": HEADER.format(turn, random.randrange(16**5))}
            body = {"model": "agent", "max_tokens": ANSWER, "temperature": 0, "tools": TOOLS, "messages": messages}
            body |= {"system": [header, fixed], "tool_choice": {"type": "any" if turn % 2 else "auto"}}
            answer = client.post("/v1/messages", json=body).raise_for_status().json()
            usages.append(answer["usage"])
            messages += [
                {"role": "assistant", "content": answer["content"] or "."},
                {"role": "user", "content": results_of(answer["content"], text) or text(RESULT)},
            ]
    return usages


def results_of(blocks: list[dict[str, Any]], text: Callable[[int], str]) -> list[dict[str, Any]]:
    """The results of the calls of an answer."""
    calls = [block["id"] for block in blocks if block["type"] == "tool_use"]
    return [{"type": "tool_result", "tool_use_id": call, "content": text(RESULT)} for call in calls]


def parser_overhead(report: Report, settings: Settings, agent: Path, plain: Path) -> None:
    """Measure the server's CPU time of an event with parsers of reasoning and calls, against that without."""
    load = LOAD._replace(tokens=60) if settings.quick else LOAD
    loads = {"parsers": (agent, load._replace(tools=True)), "no parsers": (plain, load._replace(tools=False))}
    rounds: dict[str, list[dict[str, float]]] = {kind: [] for kind in loads}
    for _ in range(settings.rounds):
        for kind, (model, its_load) in loads.items():
            rounds[kind].append(measure_served(model, its_load, "engine"))
    rows = {kind: medians(each) for kind, each in rounds.items()}
    for kind, row in rows.items():
        row = {name: round(value, 3) for name, value in row.items()}
        report.row(figure="parsers", kind=kind, **loads[kind][1]._asdict(), **row)
        rich.print(f"events of chats, {kind}: {row}")
    overhead = rows["no parsers"]["events_per_cpu_s"] / rows["parsers"]["events_per_cpu_s"] - 1
    report.check("parser_overhead", overhead, "of the CPU time of an event", target=0.05, better="lower")
