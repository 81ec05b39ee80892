"""Pages of findings that a checkpoint cannot be used (SF6..)."""

from surefoot.findings.page import Page

PAGES = {
    "SF601": Page(
        "warning",
        "a damaged checkpoint was passed over",
        "A file of it is missing or does not match the checksum in its manifest; an older one is used.",
        "Check the disk if this happens again.",
    ),
}
