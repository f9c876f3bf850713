"""Forged model files: each is refused at load with one error class, or works."""

import random
from pathlib import Path

import pytest

from bochner.storage import ModelFileError, container, load
from forging import Parts, forgeries, large_forgeries, outcome, templates, write_sparse
from fuzz_files import judge

FILES = 40  # of each kind of model; 'make fuzz' runs many more


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return templates(tmp_path_factory.mktemp("templates"))


def test_a_file_that_is_written_again_under_its_checksum_works(made, tmp_path):
    for template in made.values():
        (tmp_path / "again").write_bytes(Parts.of(template.data).data())
        assert outcome(tmp_path / "again", template) == "right"


def test_every_forged_file_is_refused_or_right(made, tmp_path):
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")  # pytest shows it where the test fails
    found = []
    for name, template in made.items():
        for number, (change, data) in enumerate(forgeries(template, seed)):
            (tmp_path / "forged").write_bytes(data)
            found.append((outcome(tmp_path / "forged", template), name, change))
            if number == FILES:
                break
    assert [one for one in found if one[0] not in ("refused", "right")] == []
    assert {one[0] for one in found} == {"refused", "right"}


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="measures memory as Linux tells it")
def test_files_that_ask_for_much_memory_or_time_get_little(made, tmp_path):
    found = []
    for name, change, data in large_forgeries(made):
        (tmp_path / "large").write_bytes(data)
        found.append((judge(tmp_path / "large", made[name]), change))
    assert [one for one in found if one[0] != "refused"] == []


@pytest.mark.parametrize("size", [2**30, 3 * 2**30])
def test_the_tensors_of_a_file_with_wrong_sizes_are_not_read(size, tmp_path, monkeypatch):
    monkeypatch.setattr(container.Container, "read_tensors", lambda *_: pytest.fail("the tensors were read"))
    write_sparse(tmp_path / "sparse", size)
    with pytest.raises(ModelFileError, match=r"estimator must be|is not a model of bochner"):
        load(tmp_path / "sparse")
