"""Plans for a trainer: chosen, judged and compared within what it can run."""
