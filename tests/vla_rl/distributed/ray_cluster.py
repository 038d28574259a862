"""Three raylets on this machine, for tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
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


def add_node(cluster: Any, **options: Any) -> None:
    """Start a raylet; the first is the head."""
    for attempt in range(1, ATTEMPTS + 1):
        try:
            cluster.add_node(**NODE, **options)
            return
        except Exception as error:
            if "timed out during startup" not in str(error) or attempt == ATTEMPTS:
                raise
