"""What plans are asked to keep beside a bound on their seconds."""

from __future__ import annotations

Counts = tuple[int, int]  # the least and the most replicas of every stage
