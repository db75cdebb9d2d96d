"""Tables for the terminal: plain text, numbers right-aligned, no control codes."""

from collections.abc import Sequence


class Table:
    """A table of known widths, whose rows can be printed as they arrive."""

    def __init__(self, headings: Sequence[str], widths: Sequence[int], left: int = 1) -> None:
        """The first `left` columns are left-aligned. Columns fit their headings."""
        self.headings, self.left = headings, left
        self.widths = [max(width, len(name)) for width, name in zip(widths, headings, strict=True)]

    def heading(self) -> str:
        return self.row(self.headings)

    def row(self, cells: Sequence[str]) -> str:
        padded = [
            cell.ljust(width) if i < self.left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(cells, self.widths, strict=True))
        ]
        return "  ".join(padded).rstrip()


def whole(headings: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """The whole table, from all its rows."""
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(len(headings))]
    table = Table(headings, widths, left)
    return "\n".join([table.heading(), *map(table.row, rows)])
