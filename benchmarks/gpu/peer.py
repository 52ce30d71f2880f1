"""PyTorch and transformers in a separate process, or the reason why they are absent: one that ends is absent too."""

import math
import subprocess
import threading
from pathlib import Path
from typing import Any

from benchmarks.gpu.timing import Round
from benchmarks.kernel_cases import Case
from benchmarks.workers import PEERS, EngineError, Worker
from jaxinfer.pallas_kernels import KVPages, Weights


class AbsentError(Exception):
    """The peer cannot run a comparison; the message says why."""


class Peer:
    """The process of `peers/run_torch_gpu.py`. Thread-safe: requests are serialised.

    Args:
      python: the interpreter that has torch and transformers.
    """

    def __init__(self, python: Path):
        self._lock, self._absent = threading.Lock(), ""
        self._worker: Worker | None = None
        code = "import importlib.util as u; print(*(m for m in ('torch', 'transformers') if u.find_spec(m) is None))"
        try:
            missing = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.split()
        except (OSError, subprocess.CalledProcessError) as error:
            self._absent = str(error)
            return
        if "torch" in missing:
            self._absent = f"{python} has no torch; pass an interpreter that has it as --peer-python"
            return
        try:
            self._worker = Worker("torch", "", [str(python), str(PEERS / "run_torch_gpu.py")])
        except EngineError as error:
            self._absent = str(error)

    @property
    def version(self) -> str:
        """The versions of the peer's libraries, or why it is absent."""
        return self._worker.version if self._worker else f"absent: {self._absent}"

    def _ask(self, **request: Any) -> dict[str, Any]:
        with self._lock:
            if self._worker is None:
                raise AbsentError(self._absent)
            try:
                answer = self._worker.ask(**request)
            except EngineError as error:
                self._worker, self._absent = None, str(error)
                raise AbsentError(self._absent) from None
        if "absent" in answer:
            raise AbsentError(answer["absent"])
        return answer

    def prepare(self, what: str, **request: Any) -> "Prepared":
        """Set up something to be timed; the script lists the possible values of `what`. Raises AbsentError."""
        return Prepared(self, self._ask(do="prepare", what=what, **request)["id"])

    def seconds(self, number: int, **options: Any) -> float:
        """Run one round of what was prepared under this number."""
        return self._ask(do="round", id=number, **options)["seconds"]

    def forget(self) -> None:
        """Free the memory of everything that was prepared. Raises AbsentError."""
        self._ask(do="forget")


class Prepared:
    """Something that the peer has set up and can time."""

    def __init__(self, peer: Peer, number: int):
        self._peer, self._number = peer, number

    def round(self, **options: Any) -> Round:
        """Return rounds that the peer times."""
        return lambda: self._peer.seconds(self._number, **options)


def torch_request(case: Case) -> dict[str, Any] | None:
    """Make the request for PyTorch's nearest: linear layers without fusion, attention over contiguous keys."""
    weights = next((x for x in case.args if isinstance(x, Weights)), None)
    if weights is not None:
        outputs, inputs = weights.shape
        fmt = {"uint16": "int4"}.get(weights.weight.dtype.name, weights.weight.dtype.name)
        if fmt not in ("bfloat16", "int8", "int4"):
            return None
        return {"what": "linear", "weights": fmt, "rows": case.rows, "outputs": outputs, "inputs": inputs}
    pages = next((x for x in case.args if isinstance(x, KVPages)), None)
    if pages is not None and pages.k_scale is None:
        x, table, positions = case.args[0], case.args[2], case.args[3]
        kv_heads, head_dim = pages.k.shape[2:]
        heads = math.prod(x.shape[2:]) // head_dim
        return {
            "what": "attention",
            "batch": len(x),
            "tokens": positions.shape[1],
            "keys": table.shape[1] * pages.k.shape[1],
            "q_heads": heads if x.ndim == 4 else heads - 2 * kv_heads,
            "kv_heads": kv_heads,
            "head_dim": head_dim,
        }
    return None
