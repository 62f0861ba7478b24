"""What the library offers beside planning: simulations, trials, reports."""
