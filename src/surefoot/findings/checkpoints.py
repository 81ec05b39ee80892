"""Catalogue pages for unusable checkpoints (SF6..)."""

from surefoot.findings.page import Page

PAGES = {
    "SF601": Page(
        "warning",
        "a damaged checkpoint was passed over",
        "A file of it is missing, is not named in its manifest, does not match its checksum or does not hold what it "
        "should. An older checkpoint is used.",
        "Check the disk if this happens again.",
    ),
}
