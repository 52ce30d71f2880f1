"""PyTorch and transformers in a separate process, or the reason why they are absent."""

import subprocess
import threading
from pathlib import Path
from typing import Any

from benchmarks.gpu.timing import Round
from benchmarks.workers import PEERS, Worker


class AbsentError(Exception):
    """The peer cannot run a comparison; the message says why."""


class Peer:
    """The process of `peers/run_torch_gpu.py`. Thread-safe: requests are serialised.

    Args:
      python: the interpreter that has torch and transformers.
    """

    def __init__(self, python: Path):
        self._lock, self._worker, self._absent = threading.Lock(), None, ""
        code = "import importlib.util as u; print(*(m for m in ('torch', 'transformers') if u.find_spec(m) is None))"
        try:
            missing = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.split()
        except (OSError, subprocess.CalledProcessError) as error:
            self._absent = str(error)
            return
        if "torch" in missing:
            self._absent = f"{python} has no torch; pass an interpreter that has it as --peer-python"
            return
        self._worker = Worker("torch", "", [str(python), str(PEERS / "run_torch_gpu.py")])

    @property
    def version(self) -> str:
        return self._worker.version if self._worker else f"absent: {self._absent}"

    def _ask(self, **request: Any) -> dict[str, Any]:
        if self._worker is None:
            raise AbsentError(self._absent)
        with self._lock:
            answer = self._worker.ask(**request)
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
        """Free the memory of everything that was prepared."""
        if self._worker is not None:
            self._ask(do="forget")

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()


class Prepared:
    """Something that the peer has set up and can time."""

    def __init__(self, peer: Peer, number: int):
        self._peer, self._number = peer, number

    def round(self, **options: Any) -> Round:
        return lambda: self._peer.seconds(self._number, **options)
