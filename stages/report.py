"""A run's tables in, a text table, a page, and pictures of the tuning curve and of the families out."""

from collections.abc import Sequence
from pathlib import Path

from lib.contracts import digests, manifest, tables
from lib.contracts.files import CompiledFiles, ModelFiles, RoundFiles, RunFiles
from lib.contracts.schemas import FAMILIES, SUBGRAPHS
from lib.contracts.tables import Provenance
from lib.report import page, rows, text
from lib.tuning.members import join

# Raise it with what is reported: the next command then writes reports of before anew.
REVISION = 4


def run(
    model: ModelFiles,
    families: Path,
    past: Sequence[RoundFiles],
    compiled: CompiledFiles,
    title: str,
    *,
    provenance: Provenance,
    out: RunFiles,
) -> Path:
    """Write the report of a compiled run.

    Args:
        title: What was tuned, and for what.
        out: Gets the text, the page, the pictures of the tuning curve and of the families (PNG) and, last, their
            manifest.

    Raises:
        MissingInput, ContractError: An input is not there, or not what it should be.
    """
    from lib.report import drawings  # with Matplotlib, for which commands that draw nothing need not wait

    found = rows.collect(model, families, past, compiled, title)
    subgraphs = join(tables.read(model.subgraphs, SUBGRAPHS), tables.read(families, FAMILIES))
    with tables.written_whole(out.curve) as partial:
        drawings.draw_curve(found.curve, found.facts["latencies_s"], title, partial)
    with tables.written_whole(out.treemap) as partial:
        drawings.picture_of_families(subgraphs, title).savefig(partial)
    with tables.written_whole(out.page) as partial:
        partial.write_text(page.run_page(found, compiled.folder), encoding="utf-8")
    with tables.written_whole(out.report) as partial:
        partial.write_text(text.report(found) + "\n", encoding="utf-8")
    return manifest.write(out.reported, provenance.inputs, {}, [out.report, out.page, out.curve, out.treemap])


def inputs(compiled: CompiledFiles) -> str:
    """Digest of what a report is made from."""
    return digests.of_text(str(REVISION), digests.of_file(compiled.manifest))


def shown(files: RunFiles) -> str:
    """A report for the terminal, with where everything lies."""
    places = f"library, parameters and manifest: {files.compiled.folder}\npage: {files.page}"
    return f"{files.report.read_text(encoding='utf-8')}\n{places}\ncurve: {files.curve}\nfamilies: {files.treemap}"
