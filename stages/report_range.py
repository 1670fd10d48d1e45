"""A bundle for a range of shapes in, a text table and a page of it out."""

from collections.abc import Sequence
from pathlib import Path

from lib.contracts import digests, manifest, tables
from lib.contracts.files import CompiledFiles, ModelFiles, RoundFiles, RunFiles
from lib.contracts.tables import Provenance
from lib.report import page, ranges

REVISION = 1  # raised with what is reported


def run(
    joint: ModelFiles,
    families: Path,
    past: Sequence[RoundFiles],
    title: str,
    *,
    provenance: Provenance,
    out: RunFiles,
) -> Path:
    """Write the report of a bundle.

    Args:
        joint: Of all shapes as one; `families`: their FAMILIES.
        past: What was recalled, and the finished rounds.
        out: Has the bundle; gets the text, the page and, last, their manifest.

    Raises:
        MissingInput, ContractError: An input is not there, or not what it should be.
    """
    found = ranges.collect(title, joint, families, past, out)
    with tables.written_whole(out.page) as partial:
        partial.write_text(page.range_page(found, out.compiled.folder), encoding="utf-8")
    with tables.written_whole(out.report) as partial:
        partial.write_text(ranges.report(found) + "\n", encoding="utf-8")
    return manifest.write(out.reported, provenance.inputs, {}, [out.report, out.page])


def inputs(compiled: CompiledFiles) -> str:
    """Digest of what a report is made from."""
    return digests.of_text(str(REVISION), digests.of_file(compiled.manifest))


def shown(files: RunFiles) -> str:
    """A report for the terminal, with where everything lies."""
    return f"{files.report.read_text(encoding='utf-8')}\nbundle: {files.compiled.folder}\npage: {files.page}"
