"""A space of what was recorded: candidates that were all measured before, to be ranked instead of evolved.

A search that proposes programs of its own cannot be replayed, since other seeds and other models find programs that
were never measured. In this space every program has an answer, so searches can be compared without noise and without
hardware (`--devices replay:FOLDER` with `[generate] spaces = recorded`).
"""

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import numpy as np

from lib.contracts import tables
from lib.contracts.errors import ConfigError
from lib.contracts.schemas import CANDIDATES
from lib.search.evolution import Proposal, Scorer
from lib.search.features import padded


class Recorded:
    """The candidates of all tables below a folder, by subgraph."""

    def __init__(self, folder: Path) -> None:
        """Read them.

        Raises:
            ConfigError: There are none.
            ContractError: A table is damaged or of another version.
        """
        paths = sorted(folder.rglob("candidates*.parquet"))
        if not paths:
            raise ConfigError(f"[generate] spaces = recorded: there is no candidates.parquet in {folder}.")
        self._found: dict[str, dict[str, Proposal]] = {}
        for path in paths:
            for row in tables.read(path, CANDIDATES).to_pylist():
                proposal = Proposal(
                    row["trace"], row["program_hash"], row["origin"], row["space"], None,
                    np.asarray(row["features"], np.float32), row["donor"],
                )  # fmt: skip
                if row["origin"] != "untuned":
                    self._found.setdefault(row["subgraph_id"], {}).setdefault(row["program_hash"], proposal)

    def sample(self, subgraph_id: str, n: int, known: Collection[str], seed: int) -> list[Proposal]:
        """Up to n at random, none of them in `known` (hashes of programs)."""
        left = self._left(subgraph_id, known)
        return [left[int(i)] for i in np.random.default_rng(seed).permutation(len(left))[:n]]

    def best(
        self, subgraph_id: str, n: int, model: Scorer, known: Collection[str], seed: int, random_share: float
    ) -> list[Proposal]:
        """Up to n that the model scores best, with a share of random ones, at least one of them where there are two."""
        left = self._left(subgraph_id, known)
        if not left:
            return []
        n_random = 0 if n < 2 or not random_share else max(1, round(random_share * n))
        scores = model.predict(padded([proposal.features for proposal in left]))
        order = np.argsort(-scores, kind="stable")
        others = np.random.default_rng(seed).permutation(order[n - n_random :])[:n_random]
        return [replace(left[int(i)], score=float(scores[i])) for i in (*order[: n - n_random], *others)]

    def look(self, subgraph_id: str, n: int, model: Scorer, best: str, known: Collection[str], seed: int) -> float:
        """By how much, as a logarithm, the best of n random programs is faster than one, as the model sees it; 0 if
        nothing is left, or that one was not recorded.

        Args:
            best: The trace of the one.
        """
        found = self.sample(subgraph_id, n, known, seed)
        own = [each for each in self._found.get(subgraph_id, {}).values() if each.trace == best][:1]
        if not found or not own:
            return 0.0
        scores = model.predict(padded([proposal.features for proposal in [*found, *own]]))
        return float(scores[:-1].max() - scores[-1])

    def _left(self, subgraph_id: str, known: Collection[str]) -> list[Proposal]:
        found = self._found.get(subgraph_id, {})
        return [proposal for key, proposal in found.items() if key not in known]
