"""Where the portions of a table are worked on: in this process one after the other, or by the workers of a Ray cluster."""

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from bochner.errors import unknown_name
from bochner.tables.errors import TableError

ENGINES = ("local", "ray")
PORTIONS_PER_WORKER = 2  # portions that are given out before the first answer is taken
MAX_MESSAGE = 300  # characters of Ray's message in ours
MAX_RETRIES = 3  # times that a portion is tried again after its worker has died

Portion = TypeVar("Portion")
Answer = TypeVar("Answer")


def check_engine(engine: str) -> None:
    """Raises a ValueError for an unknown engine, or one whose library is missing."""
    if engine not in ENGINES:
        raise ValueError(unknown_name("engine", engine, ENGINES))
    if engine == "ray":
        try:
            import ray  # noqa: F401
        except ImportError as error:
            raise ValueError("The engine 'ray' needs Ray: install bochner with the extra 'ray'.") from error


def map_portions(
    work: Callable[[Portion], Answer], portions: Iterable[Portion], engine: str = "local", gpus: int = 0
) -> Iterator[Answer]:
    """What ``work`` makes of every portion, in their order, whichever is ready first.

    Args:
        work: Applied to each portion; Ray sends it to the workers once.
        portions: The portions.
        engine: "local" or "ray". Ray uses the cluster that RAY_ADDRESS names, or starts one on this machine.
        gpus: GPUs that each worker needs.
    """
    check_engine(engine)
    return map(work, portions) if engine == "local" else _with_ray(work, portions, gpus)


def _with_ray(work: Callable[[Portion], Answer], portions: Iterable[Portion], gpus: int) -> Iterator[Answer]:
    import ray

    started = not ray.is_initialized()
    if started:
        try:
            ray.init(log_to_driver=False, include_dashboard=False, logging_level=logging.ERROR)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise TableError(f"Ray cannot be started or reached; check RAY_ADDRESS ({error}).") from error
    try:
        if gpus and not ray.cluster_resources().get("GPU"):
            raise TableError("The model is on a GPU, and Ray knows of none: use --device cpu.")
        call = ray.remote(max_retries=MAX_RETRIES, num_gpus=gpus)(_apply)
        shared = ray.put(work)
        most = PORTIONS_PER_WORKER * max(1, int(ray.cluster_resources().get("GPU" if gpus else "CPU", 1)))
        waiting: deque[ray.ObjectRef] = deque()
        for portion in portions:
            waiting.append(call.remote(shared, portion))
            if len(waiting) >= most:
                yield _answer(waiting.popleft())
        while waiting:
            yield _answer(waiting.popleft())
    finally:
        if started:
            ray.shutdown()


def _apply(work: Callable[[Portion], Answer], portion: Portion) -> Answer:
    """What a worker does."""
    return work(portion)


def _answer(reference: Any) -> Any:
    """The answer of a worker; what it raised is raised here as it was raised there."""
    import ray
    from ray.exceptions import RayError, RayTaskError, WorkerCrashedError

    try:
        return ray.get(reference)
    except RayTaskError as error:
        raise error.cause from None
    except WorkerCrashedError as error:
        raise TableError(
            f"A worker of Ray has died {MAX_RETRIES + 1} times at the same portion of the table; it may lack memory."
        ) from error
    except RayError as error:
        raise TableError(f"Ray has failed ({' '.join(str(error).split())[:MAX_MESSAGE]}).") from error
