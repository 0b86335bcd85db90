"""Which paused programs keep their KV, for how long, and who gives it up first. Pure decisions, no I/O."""
