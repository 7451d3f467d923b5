"""The paper's experiment: the list of its runs, a way through them, and the tables they end in."""
