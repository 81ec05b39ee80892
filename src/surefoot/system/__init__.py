"""Files, processes, the console and facts about the machine."""
