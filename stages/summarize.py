"""What came of several models that were tuned together, as a text and a page."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from lib.contracts import manifest, tables
from lib.contracts.clock import now
from lib.contracts.files import ModelFiles, RoundFiles, RunFiles
from lib.report import nights, page, text
from lib.report.nights import Outcome
from lib.tuning.planning import Member, PlanConfig


def run(
    joint: ModelFiles,
    families: Path,
    members: Sequence[Member],
    past: Sequence[RoundFiles],
    outcomes: Mapping[str, Outcome],
    config: PlanConfig,
    title: str,
    *,
    earlier: Sequence[Path] = (),
    out: RunFiles,
) -> Path:
    """Write the summary of a night.

    Args:
        joint: Has the MODELS table and the SUBGRAPHS of all; `families`: their FAMILIES.
        members: What is tuned, with what a second of each counts now.
        past: What was recalled, and the finished rounds.
        outcomes: Of each model, by name.
        config: By which it is told what more time may save.
        earlier: Records of nights before: their page is the one that this one is compared with.
        out: Gets the text, the page and, last, the record of them.

    Raises:
        MissingInput, ContractError: An input is not there, or not what it should be.
    """
    found = nights.collect(title, joint, families, members, past, outcomes, config, earlier)
    with tables.written_whole(out.summary) as partial:
        partial.write_text(text.summary(found) + "\n", encoding="utf-8")
    with tables.written_whole(out.night_page) as partial:
        partial.write_text(page.night_page(found, out.folder), encoding="utf-8")
    return manifest.write(out.summarized, "", nights.record(found, now()), [out.summary, out.night_page])


def failed(outcomes: Mapping[str, Outcome]) -> str:
    """Which models failed, in a line; empty if none did."""
    names = [name for name, outcome in outcomes.items() if outcome.error]
    return f"{len(names)} of {len(outcomes)} models failed: {', '.join(names)}" if names else ""
