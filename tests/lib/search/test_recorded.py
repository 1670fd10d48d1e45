import numpy as np
import pytest

from lib.contracts import tables
from lib.contracts.errors import ConfigError
from lib.contracts.schemas import CANDIDATES
from lib.contracts.tables import Provenance
from lib.search.candidates import table
from lib.search.evolution import Proposal
from lib.search.recorded import Recorded


class First:
    """Likes programs by their first feature."""

    def predict(self, features):
        return features[:, 0]


@pytest.fixture
def recorded(tmp_path):
    """Ten programs of subgraph `a` and the untuned one, in two tables that have some in common."""
    rows = [
        ("a", "f", Proposal(f'["{n}"]', f"p{n}", "sampled", "rows", None, np.array([n], np.float32))) for n in range(10)
    ]
    untuned = ("a", "f", Proposal("[[], []]", "u", "untuned", "none", None, np.zeros(0, np.float32)))
    for name, part in (("candidates.parquet", [*rows[:7], untuned]), ("more/candidates.parquet", rows[5:])):
        tables.write(table(part), tmp_path / name, CANDIDATES, Provenance())
    return Recorded(tmp_path)


def hashes(proposals):
    return [proposal.program_hash for proposal in proposals]


def test_each_program_is_there_once_and_the_untuned_one_is_not(recorded):
    assert sorted(hashes(recorded.sample("a", 99, (), 0))) == [f"p{n}" for n in range(10)]
    assert recorded.sample("b", 5, (), 0) == []


def test_the_best_by_score_come_first_with_a_random_one_and_nothing_known(recorded):
    found = recorded.best("a", 4, First(), {"p9"}, seed=0, random_share=0.05)

    assert hashes(found)[:3] == ["p8", "p7", "p6"]
    assert [proposal.score for proposal in found[:3]] == [8.0, 7.0, 6.0]
    assert len(set(hashes(found))) == 4
    assert "p9" not in hashes(found)


def test_equal_seeds_choose_alike(recorded):
    assert hashes(recorded.sample("a", 4, (), 1)) == hashes(recorded.sample("a", 4, (), 1))
    assert hashes(recorded.sample("a", 9, (), 1)) != hashes(recorded.sample("a", 9, (), 2))


def test_a_folder_without_candidates_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="spaces = recorded: there is no candidates"):
        Recorded(tmp_path)


def test_a_look_says_by_how_much_what_is_left_is_faster(recorded):
    left = {"p9", "p8"}

    assert recorded.look("a", 99, First(), '["3"]', left, seed=0) == 7.0 - 3.0
    assert recorded.look("a", 99, First(), "of another one", left, seed=0) == 0.0
    assert recorded.look("b", 99, First(), '["3"]', left, seed=0) == 0.0
