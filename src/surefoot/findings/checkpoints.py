"""Catalogue pages for unusable checkpoints (SF6..)."""

from surefoot.findings.page import Page

PAGES = {
    "SF601": Page(
        "a damaged checkpoint was skipped",
        "A file of it is missing, is not in its manifest, does not match its checksum or has unexpected content. An "
        "older checkpoint is used.",
        "Check the disk if this happens again.",
    ),
}
