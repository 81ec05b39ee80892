"""Rules: from recorded evidence to a finding. Pure functions."""
