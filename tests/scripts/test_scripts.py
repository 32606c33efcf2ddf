# SPDX-License-Identifier: Apache-2.0
"""Every script beside this file, line by line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scripts.runner import Script

SCRIPTS = sorted(Path(__file__).parent.glob("*.script"))


@pytest.mark.parametrize("path", SCRIPTS, ids=[path.stem for path in SCRIPTS])
def test_script(path: Path):
    Script(path).run()


def test_a_wrong_expectation_is_found_with_its_line(tmp_path: Path):
    path = tmp_path / "wrong.script"
    path.write_text("engine e\ne store a 2 as one\ncopies\ne ended one -> 3 STORED\n")
    with pytest.raises(AssertionError, match=r"wrong.script:4: '2 STORED', not '3 STORED'"):
        Script(path).run()


def test_there_are_scripts():
    assert len(SCRIPTS) >= 8
