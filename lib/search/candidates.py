"""A CANDIDATES table of proposals."""

from collections.abc import Sequence

import pyarrow as pa

from lib.contracts import digests
from lib.contracts.schemas import CANDIDATES
from lib.search.evolution import Proposal


def table(proposals: Sequence[tuple[str, str, Proposal]]) -> pa.Table:
    """Rows in the order of these.

    Args:
        proposals: Each with the ids of its subgraph and its family.
    """
    columns = {
        "candidate_id": [digests.of_text(subgraph_id, proposal.trace) for subgraph_id, _, proposal in proposals],
        "subgraph_id": [subgraph_id for subgraph_id, _, _ in proposals],
        "family_id": [family_id for _, family_id, _ in proposals],
        "origin": [proposal.origin for _, _, proposal in proposals],
        "space": [proposal.space for _, _, proposal in proposals],
        "program_hash": [proposal.program_hash for _, _, proposal in proposals],
        "score": [proposal.score for _, _, proposal in proposals],
        "trace": [proposal.trace for _, _, proposal in proposals],
        "donor": [proposal.donor for _, _, proposal in proposals],
        "features": [proposal.features for _, _, proposal in proposals],
    }
    arrays = [pa.array(columns[name], CANDIDATES.field(name).type) for name in columns]
    return pa.Table.from_arrays(arrays, schema=CANDIDATES.remove_metadata()).cast(CANDIDATES)
