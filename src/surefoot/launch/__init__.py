"""The processes of a run: its supervisor, the process that trains or starts the ranks, and the ranks."""
