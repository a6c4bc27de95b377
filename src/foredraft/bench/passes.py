"""Passes of a model that can be run again and again, and what a tree costs beside a chain.

Knows a model, its cache and a clock; knows no request, no drafter and no rule.
"""

from __future__ import annotations

from statistics import median
from typing import Any

import torch
from torch import Tensor

from foredraft.bench.clock import seconds_of
from foredraft.core.trees import topology
from foredraft.kernels.interface import Segment
from foredraft.models.decoder import new_cache
from foredraft.models.interface import FlatBatch
from foredraft.models.load import LoadedModel

PAGE_SIZE = 16
# Eight nodes: the two likeliest successors, of the first the two likeliest again, and so on.
TREE = (-1, -1, 0, 0, 1, 2, 2, 5)


class RepeatedPass:
    """One repeatable pass: of each request a pending token with drafts behind a context, or a
    prompt.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        rows: int,
        context: int,
        requests: int = 1,
        parents: tuple[int, ...] | None = None,
    ) -> None:
        """`parents` of the `rows - 1` draft nodes; None: they are a chain."""
        config = loaded.config
        self._model = loaded.model
        pages = -(-(context + rows) // PAGE_SIZE)
        self.cache = new_cache(config, requests * pages, PAGE_SIZE, torch.float32, loaded.device)
        tables = [list(range(i * pages, (i + 1) * pages)) for i in range(requests)]
        ids = [
            [(request + i) % config.vocab_size for i in range(context + rows)]
            for request in range(requests)
        ]
        if context:
            for table, each in zip(tables, ids, strict=True):
                segment = Segment(0, context, (), table)
                self._model.run(FlatBatch(each[:context], [segment], [context - 1]), self.cache)
        chain = tuple(range(-1, rows - 2)) if context else ()
        drafts = chain if parents is None else parents
        segments = [Segment(context, rows - len(drafts), drafts, table) for table in tables]
        asked = None if context else [rows - 1]
        self._batch = FlatBatch([i for each in ids for i in each[context:]], segments, asked)
        self.run()

    def run(self) -> Tensor:
        """The logits, of every row behind a context."""
        return self._model.run(self._batch, self.cache).logits


def tree_entry(loaded: LoadedModel, context: int, rounds: int) -> dict[str, Any]:
    """The pass of a tree beside that of a chain of as many nodes, in turns, and the gathering of
    the keys and values of its longest path.
    """
    rows = len(TREE) + 1
    chain = RepeatedPass(loaded, rows, context)
    tree = RepeatedPass(loaded, rows, context, parents=TREE)
    path = topology(TREE).path(len(TREE) - 1)
    moved = [(node, place) for place, node in enumerate(path) if node != place]
    sources, destinations = zip(*moved, strict=True)

    def gather() -> None:
        cache = tree.cache
        loaded.model.kernels.move_slots(cache.keys, cache.values, sources, destinations)

    times: dict[str, list[float]] = {"chain": [], "tree": [], "gather": []}
    for done in range(rounds):
        order = (chain, tree) if done % 2 == 0 else (tree, chain)
        for one in order:
            times["chain" if one is chain else "tree"].append(seconds_of(one.run))
        times["gather"].append(seconds_of(gather))
    of_tree, of_chain = median(times["tree"]), median(times["chain"])
    return {
        "model": loaded.name,
        "dtype": dtype_name(loaded),
        "rows": rows,
        "context": context,
        "tree": list(TREE),
        "ms": round(of_tree * 1e3, 3),
        "chain_ms": round(of_chain * 1e3, 3),
        "over_chain": round(of_tree / of_chain, 4),
        "gathered": len(moved),
        "gather_us": round(median(times["gather"]) * 1e6, 2),
        "gather_share": round(median(times["gather"]) / of_tree, 5),
    }


def dtype_name(loaded: LoadedModel) -> str:
    return str(loaded.dtype).removeprefix("torch.")
