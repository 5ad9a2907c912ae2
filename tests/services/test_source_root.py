"""Files that stand beside the packages are named where the source lies, not where a copy of it runs."""

from pathlib import Path

import pytest

from services.source_root import SOURCE, source_root


def test_it_is_the_checkout_and_in_a_copy_what_the_copy_was_begun_from(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert (source_root() / "deploy" / "kubernetes").is_dir()
    monkeypatch.setenv(SOURCE, str(tmp_path))
    assert source_root() == tmp_path
