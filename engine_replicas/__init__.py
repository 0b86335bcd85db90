"""Serves turns with vLLM: the replica that runs an engine, and the scheduler that decides which KV stays."""
