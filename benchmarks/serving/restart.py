"""The time from the start of a killed server's successor until it is ready, and until its first token."""

import asyncio
import statistics
import time

import rich

from benchmarks.report import Report
from benchmarks.serving.processes import Server
from benchmarks.serving.servers import make_requests, our_server
from benchmarks.serving.settings import Settings
from jaxinfer.evaluation.serving.client import CompletionClient


def restart(report: Report, settings: Settings) -> None:
    """Measure `restart_ready_s`: until /ready answers 200 and a first token has come; all caches are warm."""
    model, ready, first = settings.model(), [], []
    for number in range(settings.rounds + 1):
        server = our_server(model)
        with server:
            until_ready, until_token = server.wait(), first_token(server)
            server.process.kill()
        if number:  # the first one fills the caches
            ready.append(until_ready)
            first.append(until_token)
            rich.print(f"ready after {until_ready:.2f} s, first token after {until_token:.2f} s")
    medians = {"ready_s": round(statistics.median(ready), 3), "first_token_s": round(statistics.median(first), 3)}
    report.row(figure="restart", **medians, all_ready_s=ready, all_first_token_s=first)
    report.check("restart_ready_s", statistics.median(first), "s", target=15, better="lower")


def first_token(server: Server) -> float:
    """Ask for a token; return the seconds from the server's start until it came."""
    (request,) = make_requests(1, 16, 1)

    async def run() -> float:
        async with CompletionClient(f"http://127.0.0.1:{server.port}") as client:
            record = await client.complete(request, server.started)
        if record.error:
            raise server.failed() if server.process.poll() is not None else RuntimeError(record.message)
        return time.perf_counter() - server.started

    return asyncio.run(run())
