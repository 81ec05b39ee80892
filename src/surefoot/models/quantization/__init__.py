"""Weight formats."""
