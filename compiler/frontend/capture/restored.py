"""Leaves Python's values as they were: what a trace or a trial changes is none of the user's."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from functools import _lru_cache_wrapper
from typing import Any

import numpy as np

from .held import Holder, Roots, walk
from .user import is_users


@contextmanager
def restored(roots: Roots) -> Iterator[None]:
    """Whatever happens to values, lists and caches inside is undone."""
    holders, going = walk(roots)
    kept = [(holder, holder.read()) for holder in holders]
    contents = [(value, value.copy()) for value in going.containers if not isinstance(value, tuple)]
    caches = [v for v in going.seen.values() if isinstance(v, _lru_cache_wrapper)]
    clear(caches)
    try:
        yield
    finally:
        for holder, before in kept:
            put_back(holder, before)
        for value, items in contents:
            refill(value, items)
        clear(caches)


def clear(caches: Iterable[Any]) -> None:
    """Forget what functools.cache keeps for the user's functions: it belongs to one trace."""
    for cache in caches:
        code = getattr(cache.__wrapped__, "__code__", None)
        if code and is_users(code.co_filename):
            cache.cache_clear()


def put_back(holder: Holder, before: Mapping[str, object]) -> None:
    """Give what has changed its values again."""
    now = holder.read()
    for name in now.keys() - before.keys():
        holder.drop(name)
    for name, value in before.items():
        if name not in now or now[name] is not value:
            holder.put(name, value)


def refill(value: Any, before: Any) -> None:
    """Give a container its contents back; it is never empty meanwhile, for it may be Python's."""
    if isinstance(value, np.ndarray):
        if value.flags.writeable:
            np.copyto(value, before)
    elif isinstance(value, list):
        value[:] = before
    elif isinstance(value, deque):
        value.clear()
        value.extend(before)
    elif isinstance(value, MutableMapping):
        for key in [key for key in value if key not in before]:
            value.pop(key)
        value.update({k: v for k, v in before.items() if k not in value or value[k] is not v})
    else:
        value.intersection_update(before)
        value.update(before)
