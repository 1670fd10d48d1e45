"""Text that a person reads."""

from collections.abc import Sequence


def align(rows: Sequence[Sequence[str]]) -> str:
    """Columns under each other, the first row underlined: words to the left, numbers to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    right = [all(row[i][:1].isdigit() or row[i] in ("-", "") for row in rows[1:]) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [cell.rjust(w) if r else cell.ljust(w) for cell, w, r in zip(row, widths, right, strict=True)]
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)
