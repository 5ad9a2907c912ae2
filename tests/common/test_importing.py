"""Imports amid which nothing is collected."""

import gc
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.importing import importing


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    yield
    gc.unfreeze()
    gc.enable()


def test_nothing_is_collected_amid_it_and_what_came_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lamella_comes_new.py").write_text("import gc\nwas_enabled = gc.isenabled()\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    before = gc.get_freeze_count()
    with importing():
        found = importlib.import_module("lamella_comes_new")
    try:
        assert not found.was_enabled
        assert gc.isenabled()
        assert gc.get_freeze_count() > before
    finally:
        del sys.modules["lamella_comes_new"]


def test_what_has_been_imported_freezes_nothing_again() -> None:
    before = gc.get_freeze_count()
    with importing():
        importlib.import_module("json")
    assert gc.get_freeze_count() == before


def test_a_failure_and_who_had_collections_off_find_them_as_they_were() -> None:
    before = gc.get_freeze_count()
    with pytest.raises(ModuleNotFoundError), importing():
        importlib.import_module("lamella_is_not_there")
    assert gc.isenabled()
    assert gc.get_freeze_count() == before
    gc.disable()
    with importing():
        pass
    assert not gc.isenabled()
