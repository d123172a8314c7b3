"""Numbers too large to be meant, which would take hours or fill a disk before anybody saw why."""

from collections.abc import Iterator

from ..ir.spec import Spec

most_ranks = 1 << 16
"""Each has a script."""
most_actions = 1 << 18
"""Forwards of a step, over all stages: each has its place in the schedule."""
longest_s = 366 * 24 * 3600


def check_limits(spec: Spec) -> Iterator[tuple[str, str, str]]:
    """(path, message, hint) for each; other checks tell of what contradicts itself."""
    if spec.train.timeout > longest_s:
        yield "train.timeout", "train.timeout is longer than a year", "timeout: 10min"
    pipeline, data = spec.parallel.pipeline, spec.parallel.data
    ranks, actions = pipeline * data, pipeline * spec.parallel.microbatches
    if ranks != spec.cluster.num_devices:
        return
    if ranks > most_ranks:
        path = "parallel.data" if data > pipeline else "parallel.pipeline"
        message = f"pipeline {pipeline} x data {data} is {ranks} ranks, and as many scripts"
        yield path, f"{message}; ppc writes at most {most_ranks}", "fewer stages or replicas"
    elif actions > most_actions and spec.parallel.microbatches * data <= spec.train.global_batch:
        message = f"{spec.parallel.microbatches} microbatches in each of {pipeline} stages"
        hint = f"microbatches: {most_actions // pipeline} or less"
        message += f" are {actions} forwards a step; ppc plans at most {most_actions}"
        yield "parallel.microbatches", message, hint
