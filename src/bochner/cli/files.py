"""The files of a command, and the checks of them that need no library."""

from dataclasses import dataclass
from pathlib import Path

from bochner.files import check_outputs
from bochner.tables.files.paths import files_of

STDOUT = Path("-")


@dataclass(frozen=True)
class Files:
    """The files of a command.

    Attributes:
        table: The table that is read.
        out: Where the answer goes; None where there is none.
        report: Where the HTML report goes, if anywhere.
        bad_rows: Where rows that cannot be used are listed; None where there may be none.
    """

    table: Path
    out: Path | None = None
    report: Path | None = None
    bad_rows: Path | None = None

    def check(self, model: Path | None = None) -> None:
        """Raises a ValueError unless the inputs are there and all outputs can be written, are different files and no inputs."""
        inputs = files_of(self.table)
        if model is not None:
            check_model_file(model)
        if self.report == STDOUT:
            raise ValueError("The report must be a file, got '-' instead.")
        outputs = [path for path in (self.out, self.report, self.bad_rows) if path is not None and path != STDOUT]
        check_outputs(outputs, [*inputs, *([] if model is None else [model])])
        if self.report is not None and self.report.suffix.lower() not in (".html", ".htm"):
            raise ValueError(f"The report is an HTML page: its name must end with .html, got {self.report} instead.")


def check_model_file(path: Path) -> None:
    """Raises a ValueError unless a path is a file."""
    if not path.is_file():
        raise ValueError(
            f"{path} {'is a folder, not a file' if path.is_dir() else 'does not exist'}; give a model file."
        )
