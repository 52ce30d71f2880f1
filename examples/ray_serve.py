"""Serve replicas of a model behind Ray Serve, which routes requests to them and restarts those that fail.

python examples/ray_serve.py examples/demo_model --replicas 2
curl http://127.0.0.1:8000/v1/completions -d '{"model": "demo_model", "prompt": "def main():"}'

It needs Ray: pip install 'ray[serve]>=2.48'. Each replica is a process with a model of its own. Ray Serve sends a
request to the less busy one of two.
"""

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from starlette.applications import Starlette


def build(model: str, *, replicas: int, gpus: float = 0, max_requests: int = 64) -> Any:
    """Describe replicas of a model.

    gpus: of each replica, which sees no others. max_requests: that a replica takes; more wait in Ray's proxy.
    """
    from ray import serve  # pyright: ignore[reportMissingImports]

    def make_app() -> "Starlette":
        from jaxinfer import AsyncLLM, http  # in each replica, once Ray has chosen its devices

        return http.app(AsyncLLM(model, max_requests=max_requests))

    replica = serve.deployment(
        name="jaxinfer",
        num_replicas=replicas,
        max_ongoing_requests=max_requests,
        graceful_shutdown_timeout_s=20,  # for running requests
        ray_actor_options={"num_cpus": 1, "num_gpus": gpus},
    )
    return replica(serve.ingress(make_app)()).bind()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="examples/demo_model", help="a model directory")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--gpus", type=float, default=0, help="GPUs of each replica")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    args = parser.parse_args()

    from ray import serve  # pyright: ignore[reportMissingImports]

    serve.start(http_options={"host": args.host, "port": args.port})
    serve.run(build(args.model, replicas=args.replicas, gpus=args.gpus), blocking=True)


if __name__ == "__main__":
    main()
