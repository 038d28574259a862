"""Three raylets on this machine, for tests."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

NODE: dict[str, Any] = {"num_cpus": 3, "object_store_memory": 80 * 2**20}
QUICK = {"health_check_period_ms": 1000, "health_check_timeout_ms": 4000, "health_check_failure_threshold": 3}
ATTEMPTS = 3  # Ray gives a raylet 30 s to start, which is short where other tests keep the machine busy.


@contextmanager
def three_raylets() -> Iterator[Any]:
    """A cluster of a head and two further nodes, to which this process is connected."""
    import ray
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    try:
        add_node(cluster, include_dashboard=False, _system_config=QUICK)
        for _ in range(2):
            add_node(cluster)
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def add_node(cluster: Any, **options: Any) -> Any:
    """Start a raylet, which is returned; the first is the head."""
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return cluster.add_node(**NODE, **options)
        except Exception as error:
            if "timed out during startup" not in str(error) or attempt == ATTEMPTS:
                raise


def raylet(node: Any) -> int:
    """Its process's number."""
    return node.all_processes["raylet"][0].process.pid


def actors_at(node: Any) -> int:
    """How many of our actors a raylet has."""
    num = 0
    for place in Path("/proc").iterdir():
        with suppress(OSError, IndexError, ValueError):
            parent = int((place / "stat").read_text().rpartition(")")[2].split()[1])
            name = (place / "cmdline").read_bytes()
            num += parent == raylet(node) and name.startswith((b"ray::EnvHost", b"ray::Lockstep", b"ray::Ahead"))
    return num


def wait_for(what: Callable[[], bool], seconds: float = 90) -> None:
    """Wait until something is so."""
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.2)


def pause_busiest(cluster: Any) -> Any:
    """Stop a raylet besides the head that has actors, for so long that Ray gives it up; returns it."""
    import ray

    node = max((n for n in cluster.list_all_nodes() if n is not cluster.head_node), key=actors_at)
    assert actors_at(node) > 0
    os.kill(raylet(node), signal.SIGSTOP)
    wait_for(lambda: not next(n["Alive"] for n in ray.nodes() if n["NodeID"] == node.node_id))
    return node


def resume(cluster: Any, node: Any) -> Any:
    """Let a raylet that Ray gave up go on, by which it ends; start another there, and end those that stood in for it.

    Returns:
        The new one, without which the head has too few CPUs.
    """
    process = node.all_processes["raylet"][0].process
    os.kill(process.pid, signal.SIGCONT)
    wait_for(lambda: process.poll() is not None)
    cluster.remove_node(node, allow_graceful=False)
    others = [n for n in cluster.list_all_nodes() if n is not cluster.head_node]
    new = add_node(cluster)
    for other in others:
        cluster.remove_node(other, allow_graceful=False)
    return new
