"""Measurements: paired comparisons on real engines, and replays of traces."""
