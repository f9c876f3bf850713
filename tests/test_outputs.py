"""Every function that writes a file keeps one contract: links, modes, things that are no files, and disks that fill up."""

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from bochner.datasets import openml
from bochner.estimators import StationaryRegressor
from bochner.experiments.rows import read_rows, write_rows
from bochner.files import check_outputs, write_bytes, write_text
from bochner.reports import page
from bochner.reports.figures import save_figure
from bochner.storage import load, save
from bochner.tables.files.reading import BadRow, BadRows
from bochner.tables.files.writing import write_bad_rows


@pytest.fixture(scope="module")
def model():
    x = np.random.default_rng(0).normal(size=(20, 1))
    return StationaryRegressor(kernel="rbf", hidden_layer_sizes=(), random_state=0).fit(x, x[:, 0])


WRITERS = {
    "bytes": lambda path, _: write_bytes(path, b"x"),
    "text": lambda path, _: write_text(path, "x"),
    "rows": lambda path, _: write_rows(path, [{"a": 1}]),
    "figure": lambda path, _: save_figure(Figure(), path),
    "page": lambda path, _: page.write(path, "title", [page.Section("a", "b")]),
    "bad rows": lambda path, _: write_bad_rows(path, BadRows([BadRow("line 2", "bad", ("1",))])),
    "data set": lambda path, _: openml._write(path, b"x"),
    "model": lambda path, model: save(path, model),
}


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="FIFOs, links and modes are of POSIX")
@pytest.mark.parametrize("writer", WRITERS)
def test_a_writer_follows_links_keeps_modes_and_refuses_what_is_no_file(writer, model, tmp_path):
    write = WRITERS[writer]
    old, link, dangling = tmp_path / "old.svg", tmp_path / "link.svg", tmp_path / "dangling.svg"
    old.write_bytes(b"old")
    old.chmod(0o600)
    link.symlink_to(old)
    dangling.symlink_to(tmp_path / "new.svg")
    for path in (link, dangling):
        write(path, model)
        assert path.is_symlink()
    assert b"old" not in (old.read_bytes(), (tmp_path / "new.svg").read_bytes())
    assert stat.S_IMODE(old.stat().st_mode) == 0o600
    os.mkfifo(tmp_path / "fifo.svg")
    (tmp_path / "folder.svg").mkdir()
    (tmp_path / "loop.svg").symlink_to(tmp_path / "loop.svg")
    for name, message in {
        "fifo.svg": "not a regular file",
        "folder.svg": "not a regular file",
        "loop.svg": "leads back to itself",
    }.items():
        with pytest.raises(ValueError, match=message):
            write(tmp_path / name, model)
    assert stat.S_ISFIFO((tmp_path / "fifo.svg").stat().st_mode)
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("writer", WRITERS)
def test_a_full_disk_leaves_the_old_file_and_is_named(writer, model, tmp_path, monkeypatch):
    path = tmp_path / "old.svg"
    path.write_bytes(b"old")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space left on device") as error:
        WRITERS[writer](path, model)
    assert str(tmp_path) in str(error.value)
    assert path.read_bytes() == b"old"
    assert [found.name for found in tmp_path.iterdir()] == ["old.svg"]


def test_outputs_are_compared_as_they_will_be(tmp_path, monkeypatch):
    """Every pair of spellings of one file, whether it exists or not, and of different files."""
    monkeypatch.chdir(tmp_path)
    for name in ("real", "other", "folder", "up"):
        (tmp_path / name).mkdir()
    Path("folder-link").symlink_to("real")
    Path("file-link").symlink_to("real/m")
    same = [
        Path("real/m"),
        Path("./real/m"),
        Path("up/../real/m"),
        tmp_path / "real/m",
        Path("folder-link/m"),
        Path("file-link"),
    ]
    different = [Path("m"), Path("real/M2"), Path("other/m")]
    for exists in (False, True):
        if exists:
            Path("real/m").write_text("model")
            os.link("real/m", "hard")
            same.append(Path("hard"))
        for first in same:
            for second in same:
                with pytest.raises(ValueError, match="are one file"):
                    check_outputs([first, second])
                with pytest.raises(ValueError, match="is an input of this command"):
                    check_outputs([first], [second])
            for second in different:
                check_outputs([first, second])
                check_outputs([first], [second])


def test_four_threads_save_to_one_path_and_readers_see_whole_models(model, tmp_path):
    path = tmp_path / "m.bochner"
    save(path, model)
    x = np.linspace(-1, 1, 5)[:, None]

    def reads(_):
        return np.array_equal(load(path).estimator.predict(x), model.predict(x))

    with ThreadPoolExecutor(8) as pool:
        writes = [pool.submit(save, path, model) for _ in range(40)]
        assert all(pool.map(reads, range(40)))
        for end in writes:
            end.result()
    write_rows(tmp_path / "r.jsonl", [{"a": 1}])
    with ThreadPoolExecutor(8) as pool:
        writes = [pool.submit(write_rows, tmp_path / "r.jsonl", [{"a": n}] * 100) for n in range(40)]
        assert all(len({row["a"] for row in read_rows(tmp_path / "r.jsonl")}) == 1 for _ in range(40))
        for end in writes:
            end.result()
    assert sorted(found.name for found in tmp_path.iterdir()) == ["m.bochner", "r.jsonl"]
