"""docs/coverage.md says what the catalogue says, and claims nothing without a test that is there."""

import re
import runpy
from pathlib import Path

import yaml

from surefoot.health.faults import FAULTS

ROOT = Path(__file__).parents[1]


def test_the_page_is_made_from_the_catalogue() -> None:
    made = runpy.run_path(str(ROOT / "docs" / "coverage.py"))["coverage"]()
    assert (ROOT / "docs" / "coverage.md").read_text() == made, "python docs/coverage.py"


def test_what_is_claimed_names_a_test() -> None:
    for cause in yaml.safe_load((ROOT / "docs" / "causes.yaml").read_text()):
        is_claimed = cause["how"] in ("named", "prevented")
        assert is_claimed == ("test" in cause), cause["case"]
        if is_claimed:
            path, _, name = cause["test"].split(" ")[0].partition("::")
            assert f"def {name}" in (ROOT / path).read_text(), cause["case"]
            assert "codes" in cause or "why" in cause, cause["case"]
            struck = re.search(r"\((.+)\)", cause["test"])
            if struck and FAULTS[struck[1]].code:
                assert FAULTS[struck[1]].code in cause["codes"], cause["case"]
