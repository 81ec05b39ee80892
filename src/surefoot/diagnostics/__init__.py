"""What watches, checks and explains runs. The core does not import it."""
