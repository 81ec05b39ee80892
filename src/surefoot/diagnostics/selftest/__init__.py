"""`surefoot doctor --deep`: the ranks of a run, started as a run starts them, try what a run will ask of them."""
