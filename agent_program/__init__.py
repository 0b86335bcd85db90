"""Types that every package shares: ids, hints, states, errors, clocks. Standard library only."""
