"""Results as text: tables and times."""


def table(rows, header=None):
    """Rows of text in columns, the first left-aligned and the others right-aligned."""
    rows = [[str(cell) for cell in row] for row in ([header] if header else []) + list(rows)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width) for i, (cell, width) in enumerate(zip(row, widths))
        ).rstrip()
        for row in rows
    ]
    if header:
        lines.insert(1, "-" * len(max(lines, key=len)))
    return "\n".join(lines)


def facts(pairs):
    """Names and values, one pair per line; pairs whose value is None or "" are left out."""
    pairs = [(name, value) for name, value in pairs if value not in (None, "")]
    width = max(len(name) for name, _ in pairs)
    return "\n".join(f"{name.ljust(width)}  {value}" for name, value in pairs)


def written(*paths):
    """The names of the files that a command has written, in words; paths: None and "-" for what is no file."""
    return ", ".join(str(path) for path in paths if path not in (None, "-"))


def duration(seconds):
    """Seconds in a readable unit."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.3g} us"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 1000 else f"{seconds:.0f} s"


def percent(share):
    """A share as a percentage."""
    return f"{100 * share:.1f} %"
